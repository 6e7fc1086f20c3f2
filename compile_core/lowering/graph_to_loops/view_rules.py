"""Views: pure re-striding of what lies in memory, re-indexing of what is still a body.

Strides of a view of memory are not worked out here: the same operator runs on a meta tensor of the base's
strides and its result's strides are read off. So is the re-indexing of bodies, from one stand-in a dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import (
    Affine,
    Entry,
    Index,
    Indirect,
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


def strided_reindex(base_shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]) -> Reindex:
    """From an index of a view to one of its base, for a view that keeps dims or drops, repeats, slices and combines
    them.

    Of each dim of the base there is a stand-in, which moves along this dim alone: the strides of its view say how far
    each dim of the view moves along it.
    """

    @functools.cache
    def moves() -> list[tuple[int, tuple[int, ...]]]:
        found = []
        for dim in range(len(base_shape)):
            strides = [int(dim == other) for other in range(len(base_shape))]
            seen = view(torch.empty_strided(base_shape, strides, dtype=torch.uint8, device="meta"))
            found.append((int(seen.storage_offset()), tuple(seen.stride())))
        return found

    def reindex(_: Emitter, index: Index) -> Index:
        return tuple(
            _moved(
                [(entry, step) for entry, step in zip(index, steps, strict=True) if step],
                start,
                size,
            )
            for size, (start, steps) in zip(base_shape, moves(), strict=True)
        )

    return reindex


def _moved(terms: Sequence[tuple[Entry, int]], start: int, size: int) -> Entry:
    """``start`` plus some entries times their steps, as an index into a dim of ``size``."""
    total = Affine(start)
    for entry, step in terms:
        if isinstance(entry, Indirect):
            if len(terms) == 1 and (step, start, size) == (1, 0, entry.size):
                return entry
            raise NotAffineError  # in a larger dim an index beyond the view's would be in range
        total = total.plus(entry.scaled(step))
    return total


def _not_affine(_: Emitter, __: Index) -> Index:
    raise NotAffineError


def reindex_of(
    target: torch._ops.OpOverload, base_shape: tuple[int, ...], result: torch.Tensor, view: Callable[..., Any]
) -> Reindex:
    """The ``Reindex`` of one of ``VIEWS``; ``view`` is it with all its arguments but the base."""
    if target in _RESHAPES:
        return reshape_reindex(base_shape, tuple(result.shape))
    return _not_affine if target is aten.as_strided.default else strided_reindex(base_shape, view)


def flip_reindex(shape: tuple[int, ...], dims: Sequence[int]) -> Reindex:
    flipped = {d % len(shape) for d in dims} if shape else set()

    def reindex(emitter: Emitter, index: Index) -> Index:
        return tuple(
            emitter.shifted(entry, -1, shape[d] - 1, shape[d]) if d in flipped else entry
            for d, entry in enumerate(index)
        )

    return reindex


_RESHAPES = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}
)
VIEWS = _RESHAPES | {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int,
    aten.diagonal.default, aten.unfold.default, aten.as_strided.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh.default,
}  # fmt: skip

SPLITTING_VIEWS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int, aten.chunk.default}
)
