"""Bodies whose elements depend on the index itself: creation, gathers, padding, slices put into a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradsplit.compile_core.ir.tensor_spec import compute_dtype
from gradsplit.compile_core.lowering.graph_to_loops.indexed_places import (
    IndexedPlaces,
    places_along,
    places_at,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import pointwise
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Affine, Entry, Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor
from gradsplit.compile_core.lowering.graph_to_loops.random_rules import RANDOM_RULES
from gradsplit.compile_core.lowering.graph_to_loops.view_rules import flip_reindex

aten = torch.ops.aten
prims = torch.ops.prims

# Reading from all over memory is worth avoiding twice. Rows that are fewer than the times they are read are near.
_GATHER_OPERATIONS = 20
_NEAR_ROW_OPERATIONS = 4

# (arguments, keywords, fake result, origin) -> tensor, or None where this call has no rule
Rule = Callable[[Sequence[Any], Mapping[str, Any], torch.Tensor, str], LazyTensor | None]


def _plus(costs: Sequence[LazyTensor | None], operations: int) -> Cost:
    known = [tensor.current_cost() for tensor in costs if tensor is not None]
    return Cost(
        frozenset().union(*(cost.reads for cost in known)),
        operations + sum(cost.operations for cost in known),
        sum(cost.transcendental for cost in known),
    )


def _filled(value: float, result: torch.Tensor, origin: str) -> LazyTensor:
    return pointwise(result, origin, lambda emitter, _: emitter.constant(value, result.dtype), Cost())


def _full(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor | None:
    return _filled(args[1], result, origin) if isinstance(args[1], (int, float, bool)) else None


def _constant_fill(value: float) -> Rule:
    return lambda _args, _kwargs, result, origin: _filled(value, result, origin)


def _ramp(start: float, step: float, result: torch.Tensor, origin: str) -> LazyTensor:
    def emit(emitter: Emitter, index: Index) -> int:
        (position,) = index
        if not result.dtype.is_floating_point and isinstance(position, Affine):
            return emitter.affine_value(position.scaled(int(step), int(start)))
        dtype = compute_dtype(result.dtype)
        value = emitter.cast(emitter.position(position), dtype)
        value = emitter.apply("mul", (value, emitter.constant(step, dtype)), dtype)
        return emitter.apply("add", (value, emitter.constant(start, dtype)), dtype)

    return pointwise(result, origin, emit, Cost(operations=2))


def _arange(args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    return _ramp(start, step, result, origin)


def _index_select(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, origin: str
) -> LazyTensor | None:
    source, dim, indices = args
    if not source.shape or not indices.shape:
        return None
    return _indexed(source, [None] * (dim % len(source.shape)) + [indices], result, origin, wraps=False)


def _gather(
    args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str
) -> LazyTensor | None:
    source, dim, indices = args[:3]
    return _gathered(source, places_along(source.shape, dim, indices), result, origin)


def _indexed(
    source: LazyTensor,
    indices: Sequence[LazyTensor | None],
    result: torch.Tensor,
    origin: str,
    wraps: bool,
) -> LazyTensor | None:
    return _gathered(source, places_at(source.shape, indices, wraps), result, origin)


def _gathered(
    source: LazyTensor, places: IndexedPlaces | None, result: torch.Tensor, origin: str
) -> LazyTensor | None:
    """The elements at places; torch's kernels raise where there is none."""
    if not source.numel or places is None:
        return None
    is_near = places.are_rows and source.numel < result.numel()
    cost = _plus([source, *places.indices], _NEAR_ROW_OPERATIONS if is_near else _GATHER_OPERATIONS)
    reads = frozenset((buffer, min(count, result.numel())) for buffer, count in cost.reads)

    def emit(emitter: Emitter, index: Index) -> int:
        return emitter.gathered(source, places.entries(emitter, index))

    return pointwise(result, origin, emit, replace(cost, reads=reads))


def _inside(emitter: Emitter, entry: Entry, start: int, stop: int, size: int) -> int:
    """Whether an entry of a dim of ``size`` lies in ``[start, stop)``."""
    position = emitter.position(entry)
    mask = emitter.constant(True, torch.bool)
    if start > 0:
        above = emitter.apply("ge", (position, emitter.constant(start, torch.int64)), torch.bool)
        mask = emitter.apply("logical_and", (mask, above), torch.bool)
    if stop < size:
        below = emitter.apply("lt", (position, emitter.constant(stop, torch.int64)), torch.bool)
        mask = emitter.apply("logical_and", (mask, below), torch.bool)
    return mask


def _constant_pad(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, origin: str
) -> LazyTensor:
    source, pads = args[:2]
    fill = args[2] if len(args) > 2 else kwargs.get("value", 0)
    rank = len(source.shape)
    before = {rank - 1 - k: pads[2 * k] for k in range(len(pads) // 2)}

    def emit(emitter: Emitter, index: Index) -> int:
        mask = emitter.constant(True, torch.bool)
        moved = list(index)
        for d, shift in before.items():
            inside = _inside(emitter, index[d], shift, shift + source.shape[d], result.shape[d])
            mask = emitter.apply("logical_and", (mask, inside), torch.bool)
            moved[d] = emitter.shifted(index[d], 1, -shift, source.shape[d])
        with emitter.masked(mask):
            value = emitter.element(source, tuple(moved))
        return emitter.apply(
            "where", (mask, value, emitter.constant(fill, result.dtype)), compute_dtype(result.dtype)
        )

    return pointwise(result, origin, emit, _plus([source], 3))


def _slice_scatter(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, origin: str
) -> LazyTensor | None:
    settings = dict(zip(("dim", "start", "end", "step"), args[2:], strict=False)) | dict(kwargs)
    base, source = args[:2]
    if settings.get("step", 1) != 1:
        return None
    dim = settings.get("dim", 0) % len(base.shape)
    start, stop, _ = slice(settings.get("start"), settings.get("end")).indices(base.shape[dim])
    return _put(base, source, dim, start, max(stop, start), result, origin)


def _select_scatter(
    args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str
) -> LazyTensor:
    base, source, dim, position = args
    dim, position = dim % len(base.shape), position % base.shape[dim]
    return _put(base, source, dim, position, position + 1, result, origin, selected=True)


def _put(
    base: LazyTensor,
    source: LazyTensor,
    dim: int,
    start: int,
    stop: int,
    result: torch.Tensor,
    origin: str,
    selected: bool = False,
) -> LazyTensor:
    """``base`` with ``[start, stop)`` of ``dim`` replaced by ``source``."""

    def emit(emitter: Emitter, index: Index) -> int:
        mask = _inside(emitter, index[dim], start, stop, base.shape[dim])
        dtype = compute_dtype(result.dtype)
        middle = () if selected else (emitter.shifted(index[dim], 1, -start, stop - start),)
        with emitter.masked(mask):
            inner = emitter.cast(emitter.element(source, (*index[:dim], *middle, *index[dim + 1 :])), dtype)
        with emitter.masked(emitter.apply("logical_not", (mask,), torch.bool)):
            outer = emitter.element(base, index)
        return emitter.apply("where", (mask, inner, outer), dtype)

    return pointwise(result, origin, emit, _plus([base, source], 3))


def _flip(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    source, dims = args
    reindex = flip_reindex(source.shape, dims)
    return pointwise(
        result,
        origin,
        lambda emitter, index: emitter.element(source, reindex(emitter, index)),
        _plus([source], 0),
    )


def _copy(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    source = args[1]
    if not isinstance(source, LazyTensor):
        return _filled(source, result, origin)
    return pointwise(
        result, origin, lambda emitter, index: emitter.broadcast(source, index), _plus([source], 0)
    )


INDEX_RULES: Mapping[torch._ops.OpOverload, Rule] = {
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: _full,
    aten.scalar_tensor.default: lambda args, _, result, origin: _filled(args[0], result, origin),
    aten.zeros.default: _constant_fill(0),
    aten.zeros_like.default: _constant_fill(0),
    aten.new_zeros.default: _constant_fill(0),
    aten.ones.default: _constant_fill(1),
    aten.ones_like.default: _constant_fill(1),
    aten.new_ones.default: _constant_fill(1),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    prims.iota.default: lambda _, kwargs, result, origin: _ramp(
        kwargs.get("start", 0), kwargs.get("step", 1), result, origin
    ),
    **RANDOM_RULES,
    aten.embedding.default: lambda args, _, result, origin: _indexed(
        args[0], [args[1]], result, origin, wraps=False
    ),
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    **dict.fromkeys(
        (aten.index.Tensor, aten._unsafe_index.Tensor),
        lambda args, _, result, origin: _indexed(args[0], args[1], result, origin, wraps=True),
    ),
    aten.constant_pad_nd.default: _constant_pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.flip.default: _flip,
    aten.copy.default: _copy,
}

# Creations that look at the shape of a tensor, never at its elements.
SHAPE_READERS = frozenset(
    {
        aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
        aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    }
)  # fmt: skip
