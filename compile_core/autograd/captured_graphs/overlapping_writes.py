"""Refuses programs that write through a view whose elements share memory, such as an expanded one.

Functionalization makes the new base of such a view by adding up how much each of its elements has changed. That is not
what was written where several elements of one place are written, nor where what was there is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import is_wrapped_by_transform

# Also where nothing is repeated, which the strides do not tell.
_EXPANSIONS = frozenset(["expand", "expand_as", "broadcast_to", "broadcast_tensors", "meshgrid"])


class RefuseOverlappingWrites(TorchFunctionMode):
    """Watches a run of a program on fake tensors.

    Raises:
        Unsupported: it changes a tensor through an expanded view, one with overlapping elements, or a view of these.
    """

    def __init__(self) -> None:
        super().__init__()
        # Held, so that no other tensor takes the identity of one that is gone.
        self._overlapping: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = []
        if self._overlapping:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._overlapping]
        versions = [tensor._version for tensor in given]
        result = func(*args, **kwargs)
        if [tensor._version for tensor in given] != versions or _writes_wrapped(func, given):
            raise Unsupported(
                "overlapping-write",
                f"{getattr(func, '__name__', func)} writes through an expanded view or one whose elements share memory",
                "write to the tensor before it is expanded",
            )
        name = getattr(func, "__name__", "").partition(".")[0]
        expands = name in _EXPANSIONS
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            overlaps = TensorSpec.of(leaf).may_overlap
            if overlaps and name.endswith("_scatter"):
                raise Unsupported(
                    "overlapping-write", f"the copy that {name} writes to has elements that share memory"
                )
            if expands or overlaps or any(_may_share(leaf, tensor) for tensor in given):
                self._overlapping[id(leaf)] = leaf
        return result


def _writes_wrapped(function: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether it writes to one of torch.func's tensors, whose versions do not tell."""
    name = getattr(function, "__name__", "")
    is_in_place = name == "__setitem__" or name.startswith("__i") or name.endswith("_") > name.endswith("__")
    return is_in_place and any(map(is_wrapped_by_transform, given))


def _may_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_wrapped_by_transform(one) or is_wrapped_by_transform(other):
        return one._is_view()
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
