"""How a simplified nest is cut for a CPU: the vectorised axis, the blocks threads take, and what is split.

Work is divided into *units*: a unit is one block of indices of every parallel axis and all of the reduced
space. Blocks have one index except on the vectorised axis, when that is parallel, and on the second axis of a
transposing nest, where square tiles keep both sides in the first-level cache. When there are too few units to
occupy threads and the reduced space is large, each pass is instead split along a reduced axis and its partial
results are combined in order; the number of chunks depends on the shapes only, so results do not depend on
the number of threads.

Values that a nest combines with elements of memory must not meet there, one thread's and another's. Threads share the
units of those axes along which none meet. If these are few, or there is none, as where rows are added at indices,
each thread has a range of the index instead: it goes through all units, and does those whose index lies in its range,
with all else that they store.
Either way an element's values come in the order of the points, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from gradsplit.compile_core.ir.loops import (
    Access,
    Gather,
    LoopNest,
    Reduce,
    Store,
    accesses,
    combined_buffers,
    varied_axes,
)
from gradsplit.compile_core.lowering.nests.live_statements import needed_statements
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, points
from gradsplit.compile_core.lowering.nests.passes import statement_cost

_TILE = 32
_COLUMN_BLOCK = 1024
_FEW_UNITS = 16
_SPLIT_POINTS = 1 << 18
_MOST_CHUNKS = 32
GRAIN_COST = 1 << 16


@dataclass(frozen=True)
class CpuTiling:
    """See the file's head.

    Attributes:
        vector_axis: the innermost, vectorised axis; ``None`` for a nest without axes.
        blocks: for each parallel axis, how many of its indices a unit covers.
        tiled_axis: the second axis of a transposing nest's tiles, or ``None``.
        split_axis: the reduced axis along which passes are split, or ``None``.
        chunks: into how many parts.
        apart: the parallel axes whose units threads share.
        owner: the index whose range threads share instead.
        grain: the fewest units, or values of the index, that a thread is worth.
    """

    vector_axis: int | None
    blocks: tuple[int, ...]
    tiled_axis: int | None
    split_axis: int | None
    chunks: int
    apart: tuple[int, ...]
    owner: Gather | None
    grain: int


def tile_for_cpu(nest: LoopNest) -> CpuTiling:
    """Chooses the tiling of a nest that ``simplify`` returned."""
    parallel = parallel_axes(nest)
    if not nest.extents:
        return CpuTiling(None, (), None, None, 1, (), None, 1)
    vector_axis = _vector_axis(nest)
    blocks = [1] * parallel
    tiled = None
    if vector_axis < parallel:
        blocks[vector_axis] = max(1, _vector_block(nest, vector_axis))
        tiled = None if nest.reduced_axes else _transposed_axis(nest, vector_axis)
        if tiled is not None:
            blocks[tiled] = min(_TILE, nest.extents[tiled])
            blocks[vector_axis] = min(_TILE, nest.extents[vector_axis])
    counts = [-(-extent // block) for extent, block in zip(nest.extents, blocks, strict=False)]
    units = prod(counts)
    combines = bool(combined_buffers(nest))
    split_axis, chunks = None, 1
    if nest.reduced_axes and not combines and units < _FEW_UNITS and points(nest) >= _SPLIT_POINTS:
        split_axis = max(range(parallel, len(nest.extents)), key=lambda axis: nest.extents[axis])
        shortest = 4096 if split_axis == vector_axis else 8
        chunks = max(1, min(_MOST_CHUNKS, nest.extents[split_axis] // shortest))
        split_axis = split_axis if chunks > 1 else None
    apart = tuple(sorted(axes_apart(nest) & set(range(parallel))))
    shared, owner = prod(counts[axis] for axis in apart), None
    if shared < min(units, _FEW_UNITS):
        owner = owner_of(nest)
        covered = {
            *range(parallel, len(nest.extents)),
            *(axis for axis in range(parallel) if blocks[axis] > 1),
        }
        if owner is not None and varied_axes(nest)[owner.value] & covered:
            owner = None
    cost = points(nest) * sum(statement_cost(statement) for statement in nest.body) // 4
    cost_of_share = max(1, cost // max(1, shared if owner is None else owner.size))
    grain = max(1, GRAIN_COST // cost_of_share)
    return CpuTiling(vector_axis, tuple(blocks), tiled, split_axis, chunks, apart, owner, grain)


def axes_apart(nest: LoopNest) -> frozenset[int]:
    """The axes along which no two points combine values with one element: addresses move, and gathered indices do
    not."""
    combining = _combining(nest)
    varied = varied_axes(nest) if combining else []
    return frozenset(
        axis
        for axis in range(len(nest.extents))
        if all(_moves_alone(store.access, axis, varied) for store in combining)
    )


def owner_of(nest: LoopNest) -> Gather | None:
    """The gathered index that all stores which combine values have; where it differs, so do the elements."""
    combining = _combining(nest)
    owners = {replace(gather, stride=0) for store in combining for gather in store.access.gathers[:1]}
    # Under a mask an index may be anything.
    if len(owners) != 1 or any(store.mask is not None or not store.access.gathers for store in combining):
        return None
    (owner,) = owners
    needed = needed_statements(nest.body, [owner.value])
    return None if any(isinstance(nest.body[n], Reduce) for n in needed) else owner


def shares_points(nest: LoopNest) -> bool:
    """Whether threads may share all that a nest does, by its points or by where it combines values."""
    parallel = frozenset(range(parallel_axes(nest)))
    if not _combining(nest) or (not nest.reduced_axes and parallel <= axes_apart(nest)):
        return True
    owner, last = owner_of(nest), len(nest.extents) - 1
    if owner is None:
        return False
    owned = varied_axes(nest)[owner.value]
    only_combines = all(s.reduction is not None for s in nest.body if isinstance(s, Store))
    return owned <= parallel and (only_combines or last not in owned)


def _combining(nest: LoopNest) -> list[Store]:
    return [s for s in nest.body if isinstance(s, Store) and s.reduction is not None]


def _moves_alone(access: Access, axis: int, varied: Sequence[frozenset[int]]) -> bool:
    """Whether an address moves along an axis, and no gathered index does."""
    return bool(access.strides[axis]) and not any(axis in varied[gather.value] for gather in access.gathers)


def _vector_axis(nest: LoopNest) -> int:
    parallel = parallel_axes(nest)
    last_reduced = len(nest.extents) - 1
    if not nest.reduced_axes:
        return last_reduced
    if not parallel:
        return last_reduced
    return max((last_reduced, parallel - 1), key=lambda axis: _vector_score(nest, axis))


def _vector_score(nest: LoopNest, axis: int) -> float:
    """How well vector instructions along an axis would do: contiguous accesses count, short axes lose."""
    worth = 0.0
    reduced = range(parallel_axes(nest), len(nest.extents))
    for access in accesses(nest):
        # An access that stays put along the reduced axes happens rarely.
        weight = 1.0 if any(access.strides[r] for r in reduced) else 0.02
        worth += weight * {0: 0.5, 1: 1.0}.get(abs(access.strides[axis]), 0.1)
    extent = nest.extents[axis]
    return worth * extent / (extent + 16)


def _vector_block(nest: LoopNest, axis: int) -> int:
    extent = nest.extents[axis]
    if nest.reduced_axes:
        return min(extent, _COLUMN_BLOCK)
    others = prod(nest.extents[:axis])
    if others >= 64 or extent <= 2048:
        return extent
    # A long axis with few others around it: blocks of it are what threads share.
    return min(extent, max(1024, -(-extent * others // 256 // 64) * 64))


def _transposed_axis(nest: LoopNest, vector_axis: int) -> int | None:
    """Another axis along which some access is contiguous that strides along the vectorised one."""
    for access in accesses(nest):
        for axis in range(len(nest.extents)):
            if axis != vector_axis and nest.extents[axis] >= 8 and is_transposed(access, axis, vector_axis):
                return axis
    return None


def is_transposed(access: Access, contiguous_axis: int, vector_axis: int) -> bool:
    """Whether an access is contiguous along another axis than the vectorised one, along which it strides."""
    return access.strides[contiguous_axis] == 1 and abs(access.strides[vector_axis]) >= 16
