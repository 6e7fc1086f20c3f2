"""Values stored where a mask says so, as a choice between old and new ones.

The gradient of ``x[mask] = value`` is that of the elements which the mask selects, a tensor of a size that depends on
data. Where one value goes to all places, or one for all along the dims that the mask does not have, each element is one
of two, and the gradient is a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.replace_calls import replace_each
from gradsplit.compile_core.ir.numbers import expression_of
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def choose_by_masks(module: GraphModule) -> GraphModule:
    """The captured graph without such stores; ``module`` itself stays as it is."""
    return replace_each(module, _choice)


def _set(x: Tensor, key: Any, value: Tensor) -> None:
    _put_(x, key, value)


def _put_(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return x.copy_(_put(x, indices, values))


def _put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    mask = _mask_of(indices)
    others = x.dim() - mask.dim()
    if values.dim() > others:
        values = values.squeeze(0)
    return torch.where(mask[(..., *[None] * others)], values, x)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {operator.setitem: _set, torch.index_put: _put}
_METHODS: dict[Any, Callable[..., Any]] = {"index_put_": _put_, "index_put": _put, "__setitem__": _set}


def _choice(node: Node) -> Callable[..., Any] | None:
    """What stores by a choice in the place of a node, if it may."""
    found = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {}).get(node.target)
    if found is None or len(node.args) != 3 or any(node.kwargs.values()):
        return None
    x, mask, value = (_example(argument) for argument in (node.args[0], _mask_of(node.args[1]), node.args[2]))
    if not all(isinstance(example, Tensor) for example in (x, mask, value)):
        return None
    if mask.dtype is not torch.bool or (value.dtype, value.device, mask.device) != (
        x.dtype,
        x.device,
        x.device,
    ):
        return None
    others = x.dim() - mask.dim()
    sizes = value.shape if value.dim() <= others else value.shape[1:]
    is_one_for_all = (
        mask.dim() > 0
        and others >= len(sizes)
        and all(map(_are_equal, mask.shape, x.shape))
        and (value.dim() <= others or (value.dim() == others + 1 and _are_equal(value.shape[0], 1)))
        and all(
            _are_equal(size, 1) or _are_equal(size, whole)
            for size, whole in zip(sizes[::-1], x.shape[::-1], strict=False)
        )
    )
    return found if is_one_for_all and not TensorSpec.of(x).may_overlap else None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are, without a condition on those that are open."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return expression_of(one) == expression_of(other)
    return isinstance(one, int) and isinstance(other, int) and one == other


def _mask_of(key: Any) -> Any:
    """The only index of a key, before slices of whole dims."""
    if not isinstance(key, (tuple, list)):
        return key
    first, *rest = key or [None]
    return first if all(part is ... or part == slice(None) for part in rest) else None


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, Node) else None
