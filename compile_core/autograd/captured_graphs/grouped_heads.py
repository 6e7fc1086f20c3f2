"""Attention of queries in groups reads each key and value once, where the program repeats them for every query.

Models with fewer heads of keys than of queries often repeat them in the program, since not all of torch's kernels take
groups. Where one does, the repeated tensors only cost memory, and their gradients a sum over each group. One head of
keys for all queries may be given as it is: it is broadcast, but torch's fused kernels do not take it so and the scores
come to lie in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.attention_calls import (
    attention_arguments,
    change_attention,
)
from gradsplit.compile_core.autograd.captured_graphs.calls import call_arguments, call_name
from gradsplit.compile_core.autograd.captured_graphs.static_tensors import unchanged_tensor
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

# Names of functions and methods that lay the elements of their argument out in row-major order.
_RESHAPES = frozenset({"reshape", "view", "flatten"})


def takes_groups(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool) -> bool:
    """Whether one of torch's fused kernels attends in groups; ``key`` and ``value`` are those of the groups."""
    if query.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, dropout_p, is_causal, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def group_heads(module: GraphModule, keep_random_numbers: bool) -> GraphModule:
    """The captured graph whose attention takes what is repeated as it was before; ``module`` itself stays as it is.

    Args:
        keep_random_numbers: whether dropout must draw what it draws with repeated heads.
    """
    return change_attention(module, lambda node: _changes(node, keep_random_numbers))


def _changes(node: Node, keep_random_numbers: bool) -> dict[str, Any]:
    """The arguments of ``attention_laid_out`` that differ from those of the call; none where it stays."""
    arguments = attention_arguments(node)
    if arguments.get("attn_mask") is not None or arguments.get("enable_gqa", False):
        return {}
    key, value = (_of_groups(arguments[name], arguments["query"]) for name in ("key", "value"))
    if key is None or value is None or _shape(key)[1] != _shape(value)[1]:
        return {}
    dropout_p, is_causal = arguments.get("dropout_p", 0.0), arguments.get("is_causal", False)
    if dropout_p and keep_random_numbers:
        return {}
    result = TensorSpec.of(node.meta["example_value"])
    # Autocast has attention compute in the dtype of the result.
    given = (each.meta["example_value"].to(result.dtype) for each in (arguments["query"], key, value))
    query, keys, values = given
    if result.is_open or not result.is_dense or not takes_groups(query, keys, values, dropout_p, is_causal):
        return {}
    strides = arguments.get("strides", result.stride)
    return {"key": key, "value": value, "enable_gqa": True, "strides": strides}


def _of_groups(node: Node, query: Node) -> Node | None:
    """The keys or values of the groups of a query's heads, if they are fewer than the heads."""
    if _is_tensor(node, 4) and _is_tensor(query, 4) and _shape(node)[1] == 1 < _shape(query)[1]:
        return node if _shape(node)[0] == _shape(query)[0] else None
    return _before_repetition(node)


def _before_repetition(node: Node) -> Node | None:
    """The tensor [batch, heads, length, size] each head of which ``node`` has several times in a row, if it is so.

    Tensors that are changed in place at any time are left alone: what is repeated may be what they were before.
    """
    if unchanged_tensor(node) is None:
        return None
    name = call_name(node)
    if name == "repeat_interleave":
        given = call_arguments(node, ("input", "repeats", "dim"))
        source, repeats = given.get("input"), given.get("repeats")
        is_plain = type(repeats) is int and given.get("dim") in (1, -3)
        return source if is_plain and isinstance(source, Node) and _is_tensor(source, 4) else None
    if name not in _RESHAPES or not isinstance(node.args[0], Node):
        return None
    expanded = node.args[0]
    if (
        not _is_tensor(expanded, 5)
        or call_name(expanded) != "expand"
        or not isinstance(expanded.args[0], Node)
    ):
        return None
    one = expanded.args[0]
    source = one.args[0] if one.args else None
    if not _is_tensor(one, 5) or not isinstance(source, Node) or not _is_tensor(source, 4):
        return None
    wide, view, heads = (each.meta["example_value"] for each in (expanded, one, source))
    batch, groups, repeats, length, size = wide.shape
    is_repetition = (
        tuple(heads.shape) == (batch, groups, length, size)
        and tuple(view.shape) == (batch, groups, 1, length, size)
        and _shape(node) == (batch, groups * repeats, length, size)
        and view.untyped_storage()._cdata == heads.untyped_storage()._cdata
        and view.storage_offset() == heads.storage_offset()
        and (view.stride()[:2], view.stride()[3:]) == (heads.stride()[:2], heads.stride()[2:])
    )
    return source if is_repetition else None


def _is_tensor(node: Node, dims: int) -> bool:
    example = unchanged_tensor(node)
    return example is not None and example.dim() == dims


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)
