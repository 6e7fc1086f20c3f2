"""Sums at indices: ``index_add``, ``scatter_add``, ``index_put`` that accumulates, and so the gradients of gathers.

Each is one nest over the values that are added, which a store with a reduction adds to what an earlier nest filled with
zeros or with a copy; ``scatter_reduce`` finds extrema in the same way. Whatever makes the values, as a gather of rows
and a product with weights, is computed in that nest, so that they are never in memory. What narrow types would round or
wrap at each addition wider ones add up.

Torch's kernels stay

* under ``torch.use_deterministic_algorithms``, since additions come in any order;
* on a GPU for values that lie in memory already: its atomics are as fast, and its sums of 16-bit floats need no wider
  copy (but those of ``index_put``, which sorts);
* on a GPU for extrema, of which an atomic one would lose NaN;
* for truth values, and for indices that are truth values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import MEMORY_REDUCTIONS, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.graph_to_loops.indexed_places import (
    IndexedPlaces,
    places_along,
    places_at,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import (
    ProgramBuilder,
    dense_strides,
    pointwise,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_plan import GraphPlan, takes_over
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor

aten = torch.ops.aten

# Where the elements of a result are added up, if not in its own type.
_WIDER = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32,
    torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32,
}  # fmt: skip


@dataclass(frozen=True)
class _Scatter:
    """``values * factor``, which broadcast to the shape of ``places``, are combined with ``base`` there."""

    base: LazyTensor
    places: IndexedPlaces
    values: LazyTensor
    factor: float = 1
    reduction: str = "sum"


def _index_add(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Scatter | None:
    base, dim, indices, values = args
    if not base.shape or len(indices.shape) != 1 or len(values.shape) != len(base.shape):
        return None
    places = places_at(base.shape, [None] * (dim % len(base.shape)) + [indices], wraps=False)
    return places and _Scatter(base, places, values, kwargs.get("alpha", 1))


def _scatter_add(args: Sequence[Any], _: Mapping[str, Any]) -> _Scatter | None:
    base, dim, indices, values = args
    places = places_along(base.shape, dim, indices) if len(values.shape) == len(base.shape) else None
    return places and _Scatter(base, places, values)


def _index_put(args: Sequence[Any], _: Mapping[str, Any]) -> _Scatter | None:
    base, indices, values = args[:3]
    places = places_at(base.shape, indices, wraps=True)
    return places and _Scatter(base, places, values)


def _scatter_reduce(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Scatter | None:
    scatter, reduction = _scatter_add(args[:4], {}), {"amax": "max", "amin": "min"}.get(args[4], args[4])
    if scatter is None or reduction not in MEMORY_REDUCTIONS or not kwargs.get("include_self", True):
        return None
    return replace(scatter, reduction=reduction)


_RULES: Mapping[torch._ops.OpOverload, Callable[[Sequence[Any], Mapping[str, Any]], _Scatter | None]] = {
    aten.index_add.default: _index_add,
    aten.scatter_add.default: _scatter_add,
    aten.index_put.default: _index_put,
    aten.scatter_reduce.two: _scatter_reduce,
}


def lower_scatter(
    builder: ProgramBuilder, plan: GraphPlan, node: torch.fx.Node, args: Any, kwargs: Any
) -> LazyTensor | None:
    """Emits the nests of a sum at indices; ``None``, and nothing is emitted, where torch's kernel is to do it."""
    fake = node.meta["val"]
    scatter = _RULES[node.target](args, kwargs)  # type: ignore[index]
    if scatter is None or not fake.numel():
        return None
    if fake.device.type != "cpu":
        is_given = scatter.values.located() is not None and node.target is not aten.index_put.default
        if is_given or scatter.reduction != "sum":
            return None
    narrow: torch.dtype = fake.dtype
    dtype = _WIDER.get(narrow, narrow)
    view = _filled(builder, plan, node, scatter.base, dtype)
    _add(builder, view, scatter, node.name)
    sums = builder.in_memory(view, tuple(fake.stride()), node.name)
    if dtype == fake.dtype:
        return sums

    def emit(emitter: Emitter, index: Index) -> int:
        return emitter.element(sums, index)

    return pointwise(fake, node.name, emit, Cost(sums.current_cost().reads))


def _filled(
    builder: ProgramBuilder, plan: GraphPlan, node: torch.fx.Node, base: LazyTensor, dtype: torch.dtype
) -> View:
    """Memory of a dtype that holds the base: its own, if that is nobody else's."""
    fake = node.meta["val"]
    if takes_over(node, plan) and base.dtype == dtype:
        return builder.realise(base)
    view = plan.places.get(node)
    if view is None or dtype != fake.dtype:
        shape = tuple(fake.shape)
        spec = TensorSpec(shape, dense_strides(shape, fake.stride()), dtype, fake.device)
        view = builder.new_buffer(node.name, spec)
    builder.store_into(view, base)
    return view


def _add(builder: ProgramBuilder, view: View, scatter: _Scatter, origin: str) -> None:
    if 0 in scatter.places.shape:
        return
    dtype = builder.buffer_dtype(view.buffer)

    def body(emitter: Emitter, index: Index) -> None:
        place = emitter.access(view, scatter.places.entries(emitter, index))
        value = emitter.cast(emitter.broadcast(scatter.values, index), dtype)
        if scatter.factor != 1:
            value = emitter.apply("mul", (value, emitter.constant(scatter.factor, dtype)), dtype)
        emitter.store(place, value, reduction=scatter.reduction)

    builder.emit_nest(scatter.places.shape, (), body, origin)
