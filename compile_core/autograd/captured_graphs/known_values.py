"""The values of a captured graph that depend on no input and on no random state, found by computing them.

The operators run on the CPU, whatever device the program names. A value that does not vary along a dim is kept expanded
along it, and an operation by element computes such a dim once, so that the masks of all samples cost what one costs.

Computed are operators whose results are the same on every device: all by element on integers and bools, of those on
floats the ones that IEEE rounds (sums, products, comparisons, choices), factories, views, and some that move elements.
Everything else is unknown, and so is what is computed from it; what somewhere in the graph is changed in place; what
has a gradient or a symbolic size; what is large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from gradsplit.compile_core.autograd.captured_graphs.static_tensors import is_unchanged
from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.ir.higher_order import CHECKPOINTS
from gradsplit.compile_core.torch_facts.thread_state import DisableTorchFunction, disable_current_modes

aten = torch.ops.aten

# The largest value that is computed, in elements: a mask over 8192 by 8192 positions, about a second; one over 1024 by
# 1024 takes some milliseconds.
_LARGEST = 2**26

# What they fill with: a value, or the position of the argument that says it.
_FILLED_WITH: Mapping[Any, float] = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
_FILLED_WITH_ARGUMENT: Mapping[Any, int] = {
    aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2,
}  # fmt: skip
_RANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})

# These of the operators by element round alike everywhere.
_EXACT_ON_FLOATS = frozenset(
    {
        aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.where, aten.masked_fill, aten.clone, aten.eq, aten.ne,
        aten.lt, aten.le, aten.gt, aten.ge, aten.logical_not, aten.logical_and, aten.logical_or, aten.maximum,
        aten.minimum, aten.isinf, aten.isnan,
    }
)  # fmt: skip
_WITH_FACTOR = frozenset({aten.add, aten.sub, aten.rsub})

_MOVING = frozenset(
    {aten.index.Tensor, aten.cat.default, aten.tril.default, aten.triu.default, aten.flip.default,
     aten.repeat.default, aten._unsafe_view.default}
)  # fmt: skip
_ALONG_DIMS = frozenset({aten.cumsum.default, aten.any.dim, aten.all.dim, aten.sum.dim_IntList})

# Of their tensor argument they ask no element.
_LIKE = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, "new_zeros", "new_ones", "new_full"},
)


class _Unknown(Exception):
    """A value is not computed."""


def known_values(
    module: GraphModule, wanted: Iterable[Node], given: Mapping[Node, Tensor] = MappingProxyType({})
) -> dict[Node, Tensor]:
    """Those of the nodes ``wanted`` whose value is known, as tensors of the CPU that may be expanded.

    Args:
        module: a captured graph, whose nodes have their fake result in ``meta["example_value"]``.
        given: values of placeholders.
    """
    wanted = set(wanted)
    needed = ancestors(wanted) - set(given)
    changed = _changed_memory(module) if needed else set()
    values: dict[Node, Any] = dict(given)
    with disable_current_modes(), DisableTorchFunction(), torch.no_grad(), _ComputeKnown():
        for node in module.graph.nodes:
            if node not in needed:
                continue
            try:
                values[node] = _compute(node, values, changed)
            except Exception:  # what the program would raise, it raises when it runs
                continue
    return {node: values[node] for node in wanted if isinstance(values.get(node), Tensor)}


def _changed_memory(module: GraphModule) -> set[int]:
    """The storages that some operation of the program changes, or may change without telling."""
    changed: set[int] = set()
    for node in module.graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor) and not is_unchanged(example):
            changed.add(_storage(example))
        # A checkpoint's body changes nothing: that is refused.
        bodies = any(source.op == "get_attr" for source in node.all_input_nodes)
        if (bodies and node.target not in CHECKPOINTS) or "out" in node.kwargs:
            examples = (source.meta.get("example_value") for source in node.all_input_nodes)
            changed.update(_storage(example) for example in examples if isinstance(example, Tensor))
    return changed


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _compute(node: Node, values: Mapping[Node, Any], changed: set[int]) -> Any:
    if node.op == "call_method":
        function: Any = getattr(Tensor, str(node.target))
    elif node.op == "call_function" and _is_torch_function(node.target):
        function = node.target
    else:
        raise _Unknown

    def value_of(source: Node) -> Any:
        if source in values:
            return values[source]
        if node.target in _LIKE:
            return source.meta["example_value"]
        raise _Unknown

    on_cpu = torch.device("cpu")
    args, kwargs = map_aggregate(
        map_arg((node.args, node.kwargs), value_of),
        lambda value: on_cpu if isinstance(value, torch.device) else value,
    )  # type: ignore[misc]
    value = function(*args, **kwargs)
    example = node.meta["example_value"]
    if not isinstance(example, Tensor):
        return value
    if (
        not isinstance(value, Tensor)
        or example.requires_grad
        or _storage(example) in changed
        or value.dtype != example.dtype
        or value.shape != example.shape
    ):
        raise _Unknown
    return value


def _is_torch_function(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, BuiltinFunctionType) or module.partition(".")[0] in ("torch", "_operator")


class _ComputeKnown(TorchDispatchMode):
    """Computes the operators below torch's functions, each on as few elements as possible, or refuses them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if func._schema.is_mutable:
            raise _Unknown
        if func.is_view:
            return func(*args, **kwargs)
        if func in _FILLED_WITH or func in _FILLED_WITH_ARGUMENT:
            return _filled(func, args, kwargs)
        if func in _RANGES and all(isinstance(number, int) for number in args):
            _limit(func(*args, **{**kwargs, "device": "meta"}).numel())
            return func(*args, **kwargs)
        if func is aten._to_copy.default:
            return _by_element(func, args, {**kwargs, "memory_format": None})
        if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
            return _by_element(func, args, kwargs)
        if func in _MOVING or (func in _ALONG_DIMS and not args[0].is_floating_point()):
            return _moved(func, args, kwargs)
        raise _Unknown


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result = func(*_on_meta(args), **{**kwargs, "device": "meta"})
    fill = _FILLED_WITH.get(func)
    if fill is None:
        fill = args[_FILLED_WITH_ARGUMENT[func]]
    return torch.full([1] * result.dim(), fill, dtype=result.dtype).expand(result.shape)


def _by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    varied = [any(_varies(tensor, dim - len(shape)) for tensor in tensors) for dim in range(len(shape))]
    _limit(prod(size for size, varies in zip(shape, varied, strict=True) if varies))

    def once(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim in range(value.dim()):
            if not varied[dim - value.dim()]:
                value = value.narrow(dim, 0, min(value.shape[dim], 1))
        return value

    result = func(*map(once, args), **kwargs)
    if any(tensor.is_floating_point() for tensor in (*tensors, result)):
        _check_exact(func, args, kwargs, tensors, result)
    return result.expand(shape)


def _check_exact(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> None:
    if func is aten._to_copy.default:
        # A float that no integer can hold becomes another integer on each device.
        exact = result.is_floating_point() or result.dtype == torch.bool
    else:
        exact = func.overloadpacket in _EXACT_ON_FLOATS
    if func.overloadpacket in _WITH_FACTOR and (len(args) > 2 or kwargs.get("alpha", 1) != 1):
        exact = False
    if not exact:
        raise _Unknown


def _varies(tensor: Tensor, dim: int) -> bool:
    """Whether a tensor varies along a dim, counted from its last."""
    return -dim <= tensor.dim() and tensor.shape[dim] != 1 and tensor.stride(dim) != 0


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _limit(func(*_on_meta(args), **_on_meta(kwargs)).numel())
    return without_repetition(func(*args, **kwargs))


def without_repetition(value: Tensor) -> Tensor:
    """The same tensor, expanded along the dims along which it does not vary."""
    shape = value.shape
    if 0 in shape:
        return value
    for dim, size in enumerate(shape):
        first = value.narrow(dim, 0, 1)
        if size > 1 and bool((value == first).all()):
            value = first
    return value.expand(shape)


def _on_meta(arguments: Any) -> Any:
    return map_aggregate(arguments, lambda value: value.to("meta") if isinstance(value, Tensor) else value)


def _limit(elements: int) -> None:
    if elements > _LARGEST:
        raise _Unknown
