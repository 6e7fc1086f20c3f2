"""What a call is given as ``out=``, where a graph would do otherwise than the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.torch_facts.dispatcher import tags_by_name

# Autograd makes the history of such a tensor anew, from whatever it was a view of and who held its gradient: what a
# graph has returned has another.
RESIZED_WITH_HISTORY = "resized-out-with-history"


def refuse_unlike_out(function: Any, out: list[fx.Node], arguments: Any, keywords: Any) -> None:
    """An ``out=`` of another dtype changes what is computed (a sum is of elements cast to it), or is refused by some
    operators; fake tensors take no notice of either. A trace would forget how it lies in memory. One of another size is
    resized, which no graph does to what shares its memory with something. One over what is read is written to while a
    kernel reads.

    A new one without elements may be: the result takes its place. Fake tensors then lie in row-major order, kernels as
    the result does, as a rule.
    """
    given = [node.meta["example_value"] for node in out]
    without = {**keywords, "out": None}
    leaves = tree_leaves((arguments, without))
    read = {id(value) for value in leaves}
    new = all(
        tensor.numel() == 0 and not tensor._is_view() and not node.users and id(tensor) not in read
        for node, tensor in zip(out, given, strict=True)
    )
    try:
        results = tree_leaves(function(*arguments, **without))
    except Exception:  # whatever it is, the call itself tells
        return
    resized = [
        tensor
        for result, tensor in zip(results, given, strict=False)
        if result.shape != tensor.shape and not (new and result.is_contiguous())
    ]
    if resized:
        has_history = any(tensor.requires_grad or tensor._is_view() for tensor in resized)
        raise Unsupported(
            RESIZED_WITH_HISTORY if has_history else "resized-out",
            "a result given as out= is resized",
            "give one of the result's size, or an empty one",
        )
    shared = [(tensor, value) for tensor in given for value in leaves if _share_memory(tensor, value)]
    # Elementwise kernels read each element when they write it, and refuse what shares memory otherwise.
    if shared and not (
        torch.Tag.pointwise in tags_by_name(function) and all(_are_same_elements(*pair) for pair in shared)
    ):
        raise Unsupported(
            "out-over-input",
            "a result given as out= shares its memory with what the call reads, which sees some of the result by then",
            "give another tensor, and copy it afterwards",
        )
    if any(_is_of_another_kind(result, tensor) for result, tensor in zip(results, given, strict=False)):
        raise Unsupported(
            "out-of-other-kind",
            "a result given as out= has another dtype, or lies otherwise in memory, than what is computed",
            "give one that is as the result is, and cast or copy it afterwards",
        )


def _share_memory(tensor: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return tensor.untyped_storage()._cdata == value.untyped_storage()._cdata


def _are_same_elements(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return tensor.storage_offset() == value.storage_offset() and (tensor.shape, tensor.stride()) == (
        value.shape,
        value.stride(),
    )


def _is_of_another_kind(result: torch.Tensor, out: torch.Tensor) -> bool:
    differ = any(n != 1 and a != b for n, a, b in zip(out.shape, out.stride(), result.stride(), strict=False))
    return result.dtype != out.dtype or (result.shape == out.shape and differ)
