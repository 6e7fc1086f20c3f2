"""The axes of a nest in the order, and merged as far, as its memory accesses like best.

A nest arrives with the axes of the tensors it came from. Axes of size 1 are dropped, parallel and reduced
axes are each sorted by falling stride (stores vote first, as in torch's TensorIterator), and neighbours that
every access walks as one are merged: an addition of two contiguous 4-d tensors becomes a single loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    Load,
    LoopNest,
    Position,
    Reduce,
    Statement,
    Store,
)


def simplify(nest: LoopNest) -> LoopNest:
    """An equivalent nest with as few axes as its accesses allow, innermost the one of the smallest
    strides."""
    nest = with_axes(nest, [axis for axis, extent in enumerate(nest.extents) if extent != 1])
    parallel = len(nest.extents) - nest.reduced_axes
    accesses = _accesses(nest)
    order = _sorted(accesses, list(range(parallel))) + _sorted(
        accesses, list(range(parallel, len(nest.extents)))
    )
    return _merged(_without_trivial_reductions(with_axes(nest, order)))


def parallel_axes(nest: LoopNest) -> int:
    return len(nest.extents) - nest.reduced_axes


def points(nest: LoopNest) -> int:
    """How often the body is executed."""
    return prod(nest.extents)


def _accesses(nest: LoopNest) -> list[Access]:
    stores = [s.access for s in nest.body if isinstance(s, Store)]
    loads = [s.access for s in nest.body if isinstance(s, Load)]
    # A broadcast load says little about the order, one that moves along all axes says most.
    loads.sort(key=lambda access: -sum(stride != 0 for stride in access.strides))
    return stores + loads


def _sorted(accesses: list[Access], axes: list[int]) -> list[int]:
    """Insertion sort, since "no opinion" between two axes is not transitive."""
    ordered: list[int] = []
    for axis in axes:
        position = len(ordered)
        while position > 0 and _belongs_inside(accesses, ordered[position - 1], axis):
            position -= 1
        ordered.insert(position, axis)
    return ordered


def _belongs_inside(accesses: list[Access], outer: int, inner: int) -> bool:
    """Whether ``outer``, which stands before ``inner``, has the smaller strides."""
    for access in accesses:
        first, second = abs(access.strides[outer]), abs(access.strides[inner])
        if first and second and first != second:
            return first < second
    return False


def with_strides(
    nest: LoopNest, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> tuple[Statement, ...]:
    """The body with other strides in place of those of each access and position."""
    body: list[Statement] = []
    for statement in nest.body:
        if isinstance(statement, Load | Store):
            old = statement.access
            access = Access(old.buffer, change(old.strides), old.offset, old.gathers)
            if isinstance(statement, Load):
                statement = Load(access, statement.dtype, statement.mask, statement.other)
            else:
                statement = Store(access, statement.value, statement.mask, statement.reduction)
        elif isinstance(statement, Position):
            statement = replace(statement, strides=change(statement.strides))
        body.append(statement)
    return tuple(body)


def with_axes(nest: LoopNest, kept: list[int]) -> LoopNest:
    """The nest with these axes, in this order; an axis left out is at index 0 throughout."""
    stays = any(isinstance(s, Position) and not any(s.strides) for s in nest.body)
    if kept == list(range(len(nest.extents))) and not stays:
        return nest
    parallel = parallel_axes(nest)
    body = with_strides(nest, lambda strides: tuple(strides[axis] for axis in kept))
    return replace(
        nest,
        extents=tuple(nest.extents[axis] for axis in kept),
        reduced_axes=sum(axis >= parallel for axis in kept),
        body=tuple(
            Constant(s.offset, torch.int64) if isinstance(s, Position) and not any(s.strides) else s
            for s in body
        ),
    )


def cut_axis(nest: LoopNest, axis: int, inner: int) -> LoopNest:
    """The nest with one axis as two, of which the second has the extent ``inner``."""

    def cut(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (*strides[:axis], strides[axis] * inner, strides[axis], *strides[axis + 1 :])

    extents = (*nest.extents[:axis], nest.extents[axis] // inner, inner, *nest.extents[axis + 1 :])
    reduced = nest.reduced_axes + (axis >= parallel_axes(nest))
    return replace(nest, extents=extents, body=with_strides(nest, cut), reduced_axes=reduced)


def _without_trivial_reductions(nest: LoopNest) -> LoopNest:
    """A reduction over no axes (all had size 1) is its argument."""
    if nest.reduced_axes:
        return nest
    body: list[Statement] = []
    for statement in nest.body:
        if isinstance(statement, Reduce) and statement.operation in ("argmax", "argmin"):
            body.append(Constant(0, torch.int64))
        elif isinstance(statement, Reduce) and statement.operation == "deviations":
            body.append(Constant(0.0, statement.dtype))
        elif isinstance(statement, Reduce):
            body.append(Apply("cast", (statement.argument,), statement.dtype))
        else:
            body.append(statement)
    return replace(nest, body=tuple(body))


def _merged(nest: LoopNest) -> LoopNest:
    """Every pair of neighbours that all accesses and positions walk as one longer axis becomes that axis."""
    walks = [access.strides for access in _accesses(nest)]
    walks += [statement.strides for statement in nest.body if isinstance(statement, Position)]
    for outer in range(len(nest.extents) - 1):
        inner = outer + 1
        if inner == parallel_axes(nest):
            continue
        extent = nest.extents[inner]
        if any(strides[outer] != strides[inner] * extent for strides in walks):
            continue
        kept = [axis for axis in range(len(nest.extents)) if axis != outer]
        longer = (*nest.extents[:inner], nest.extents[outer] * extent, *nest.extents[inner + 1 :])
        return _merged(with_axes(replace(nest, extents=longer), kept))
    return nest
