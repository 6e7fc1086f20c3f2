"""Views: pure re-striding of what lies in memory, re-indexing of what is still a body.

Strides of a view of memory are not worked out here: the same operator runs on a meta tensor of the base's
strides and its result's strides are read off. Only the re-indexing of bodies needs a rule per operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import (
    Affine,
    Index,
    NotAffineError,
    reshape_index,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Emitter, LazyTensor, Reindex

aten = torch.ops.aten


def restride(view: View, function: Callable[[torch.Tensor], torch.Tensor]) -> View | None:
    """Where ``function``'s result lies, given a view operator; ``None`` if strides cannot express it."""
    span = (
        1
        + view.offset
        + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True) if size)
    )
    storage = torch.empty(max(span, 0), dtype=torch.uint8, device="meta")
    try:
        result = function(torch.as_strided(storage, view.shape, view.stride, view.offset))
    except RuntimeError:
        return None
    return View(view.buffer, tuple(result.shape), tuple(result.stride()), int(result.storage_offset()))


def view_of(
    base: LazyTensor, result: torch.Tensor, origin: str, reindex: Reindex | None, function: Callable[..., Any]
) -> LazyTensor:
    """The tensor that ``function`` makes of ``base``; ``result`` is its fake value.

    Size-0 results need no re-indexing, ever: nothing reads them.
    """
    return LazyTensor(
        tuple(result.shape),
        base.dtype,
        base.device,
        tuple(result.stride()),
        origin,
        base=base,
        reindex=reindex,
        restride=lambda view: restride(view, function),
    )


def reshaped(base: LazyTensor, shape: tuple[int, ...], origin: str) -> LazyTensor:
    """The tensor in another shape of as many elements."""
    return LazyTensor(
        shape,
        base.dtype,
        base.device,
        contiguous_strides(shape),
        origin,
        base=base,
        reindex=reshape_reindex(base.shape, shape),
        restride=lambda view: restride(view, lambda tensor: tensor.view(shape)),
    )


def reshape_reindex(base_shape: tuple[int, ...], shape: tuple[int, ...]) -> Reindex:
    return lambda emitter, index: reshape_index(index, shape, base_shape, emitter.extents)


def permute_reindex(dims: Sequence[int]) -> Reindex:
    def reindex(_: Emitter, index: Index) -> Index:
        by_dim = dict(zip(dims, index, strict=True))
        return tuple(by_dim[d] for d in range(len(dims)))

    return reindex


def expand_reindex(base_shape: tuple[int, ...]) -> Reindex:
    def reindex(_: Emitter, index: Index) -> Index:
        tail = index[len(index) - len(base_shape) :]
        return tuple(Affine() if size == 1 else entry for size, entry in zip(base_shape, tail, strict=True))

    return reindex


def affine_dim_reindex(dim: int, factor: int, shift: int, size: int) -> Reindex:
    """Position ``i`` of ``dim`` is position ``i * factor + shift`` of the base's dim of ``size``."""

    def reindex(emitter: Emitter, index: Index) -> Index:
        return *index[:dim], emitter.shifted(index[dim], factor, shift, size), *index[dim + 1 :]

    return reindex


def select_reindex(dim: int, position: int) -> Reindex:
    return lambda _, index: (*index[:dim], Affine(position), *index[dim:])


def _squeeze_reindex(base_shape: tuple[int, ...], kept: Sequence[int]) -> Reindex:
    def reindex(_: Emitter, index: Index) -> Index:
        entries = dict(zip(kept, index, strict=True))
        return tuple(entries.get(d, Affine()) for d in range(len(base_shape)))

    return reindex


def _diagonal_reindex(rank: int, offset: int, dim1: int, dim2: int) -> Reindex:
    def reindex(_: Emitter, index: Index) -> Index:
        last = index[-1]
        if not isinstance(last, Affine):
            raise NotAffineError
        ends = {dim1: last.scaled(1, max(-offset, 0)), dim2: last.scaled(1, max(offset, 0))}
        rest = iter(index[:-1])
        return tuple(ends[d] if d in ends else next(rest) for d in range(rank))

    return reindex


def _unfold_reindex(dim: int, step: int) -> Reindex:
    def reindex(_: Emitter, index: Index) -> Index:
        start, within = index[dim], index[-1]
        if not (isinstance(start, Affine) and isinstance(within, Affine)):
            raise NotAffineError
        return *index[:dim], start.scaled(step).plus(within), *index[dim + 1 : -1]

    return reindex


def _not_affine(_: Emitter, __: Index) -> Index:
    raise NotAffineError


# One rule makes a ``Reindex`` from the base's shape, the result's shape and the operator's other arguments.
Rule = Callable[..., Reindex]


def _reshape(shape: tuple[int, ...], result: tuple[int, ...], *_: Any) -> Reindex:
    return reshape_reindex(shape, result)


def _permute(shape: tuple[int, ...], _: tuple[int, ...], dims: Sequence[int]) -> Reindex:
    return permute_reindex([d % len(shape) for d in dims])


def _transpose(shape: tuple[int, ...], _: tuple[int, ...], dim0: int = 0, dim1: int = 1) -> Reindex:
    dims = list(range(len(shape)))
    if len(dims) > 1:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute_reindex(dims)


def _expand(shape: tuple[int, ...], *_: Any, **__: Any) -> Reindex:
    return expand_reindex(shape)


def _same(shape: tuple[int, ...], *_: Any, **__: Any) -> Reindex:
    return permute_reindex(range(len(shape)))


def _squeeze(shape: tuple[int, ...], _: tuple[int, ...], dims: int | Sequence[int] | None = None) -> Reindex:
    rank = len(shape)
    chosen = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {d % rank for d in chosen if shape[d] == 1} if rank else set()
    return _squeeze_reindex(shape, [d for d in range(rank) if d not in dropped])


def _unsqueeze(shape: tuple[int, ...], _: tuple[int, ...], dim: int) -> Reindex:
    dim %= len(shape) + 1
    return lambda _, index: index[:dim] + index[dim + 1 :]


def _slice(
    shape: tuple[int, ...],
    _: tuple[int, ...],
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Reindex:
    dim %= len(shape)
    first = slice(start, end, step).indices(shape[dim])[0]
    return affine_dim_reindex(dim, step, first, shape[dim])


def _select(shape: tuple[int, ...], _: tuple[int, ...], dim: int, position: int) -> Reindex:
    dim %= len(shape)
    return select_reindex(dim, position % shape[dim])


def _diagonal(
    shape: tuple[int, ...], _: tuple[int, ...], offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Reindex:
    return _diagonal_reindex(len(shape), offset, dim1 % len(shape), dim2 % len(shape))


def _unfold(shape: tuple[int, ...], _: tuple[int, ...], dim: int, __: int, step: int) -> Reindex:
    return _unfold_reindex(dim % max(len(shape), 1), step) if shape else _not_affine


def _as_strided(*_: Any, **__: Any) -> Reindex:
    return _not_affine


def flip_reindex(shape: tuple[int, ...], dims: Sequence[int]) -> Reindex:
    flipped = {d % len(shape) for d in dims} if shape else set()

    def reindex(emitter: Emitter, index: Index) -> Index:
        return tuple(
            emitter.shifted(entry, -1, shape[d] - 1, shape[d]) if d in flipped else entry
            for d, entry in enumerate(index)
        )

    return reindex


VIEW_RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.permute.default: _permute,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
    aten.as_strided.default: _as_strided,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
}

SPLITTING_VIEWS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int, aten.chunk.default}
)


def split_reindex(
    target: torch._ops.OpOverload, shape: tuple[int, ...], args: Sequence[Any], results: Any
) -> list[Reindex]:
    """One ``Reindex`` per result of a splitting view."""
    dim_position = 0 if target is aten.unbind.int else 1
    dim = (args[dim_position] if len(args) > dim_position else 0) % len(shape)
    if target is aten.unbind.int:
        return [select_reindex(dim, position) for position in range(shape[dim])]
    starts = [0]
    for result in results:
        starts.append(starts[-1] + result.shape[dim])
    return [affine_dim_reindex(dim, 1, start, shape[dim]) for start in starts[:-1]]
