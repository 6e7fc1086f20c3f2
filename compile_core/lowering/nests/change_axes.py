"""Changes of a nest's iteration space: cutting, merging, dropping and reordering axes.

Each is a re-emission of the body in which every old axis is an affine function of the new ones, so constant
folding and interning of equal statements happen along the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
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
    accesses,
    combined_buffers,
    varied_axes,
)
from gradsplit.compile_core.lowering.nests.body_builder import BodyBuilder
from gradsplit.compile_core.lowering.nests.live_statements import without_dead_statements

# For each old axis, its terms (new axis, coefficient); an axis of extent 1 has none.
AxisMap = Sequence[Sequence[tuple[int, int]]]
BufferDtype = Callable[[str], torch.dtype]


class Transplant:
    """Copies bodies into a builder over new axes, one statement at a time.

    Attributes:
        stored: accesses of the buffers that were stored to so far and the values there, by buffer.
    """

    def __init__(self, builder: BodyBuilder) -> None:
        self.builder = builder
        self.stored: dict[str, list[tuple[Access, int | None]]] = {}

    def copy(self, nest: LoopNest, axes: AxisMap) -> list[int]:
        """Appends a nest's body; loads of what was stored before become the stored values. Returns the new number of
        each statement, which is -1 for a store.

        Raises:
            OtherPointsError: a load reads what was stored before, but not at the very point where it was.
        """
        values: list[int] = []
        for statement in nest.body:
            values.append(self._copy_statement(statement, values, axes))
        return values

    def _copy_statement(self, statement: Statement, values: list[int], axes: AxisMap) -> int:
        builder = self.builder
        if isinstance(statement, Constant):
            return builder.add(statement)
        if isinstance(statement, Position):
            return builder.point(self._strides(statement.strides, axes), statement.offset)
        if isinstance(statement, Apply):
            arguments = [values[argument] for argument in statement.arguments]
            return builder.apply(statement.operation, arguments, statement.dtype, statement.parameter)
        if isinstance(statement, Reduce):
            return builder.reduce(statement.operation, values[statement.argument], statement.dtype)
        access = self._access(statement.access, values, axes)
        mask = None if statement.mask is None else values[statement.mask]
        if isinstance(statement, Store):
            value = values[statement.value]
            builder.store(access, value, mask, statement.reduction)
            is_known = mask is None and statement.reduction is None
            self.stored.setdefault(access.buffer, []).append((access, value if is_known else None))
            return -1
        if access.buffer in self.stored:
            return self._forward(access, statement, mask)
        return builder.load(access, mask, statement.other)

    def _forward(self, access: Access, load: Load, mask: int | None) -> int:
        for stored, value in self.stored[access.buffer]:
            if stored == access and value is not None:
                value = self.builder.round_to(value, self.builder.buffer_dtype(access.buffer))
                if mask is None:
                    return value
                other = self.builder.constant(load.other, load.dtype)
                return self.builder.apply("where", (mask, value, other), load.dtype)
        raise OtherPointsError(access.buffer)

    def _strides(self, strides: Sequence[int], axes: AxisMap) -> tuple[int, ...]:
        moved = [0] * len(self.builder.extents)
        for stride, terms in zip(strides, axes, strict=True):
            for axis, coefficient in terms:
                moved[axis] += stride * coefficient
        return tuple(moved)

    def _access(self, access: Access, values: Sequence[int], axes: AxisMap) -> Access:
        gathers = tuple(replace(gather, value=values[gather.value]) for gather in access.gathers)
        return Access(access.buffer, self._strides(access.strides, axes), access.offset, gathers)


class OtherPointsError(Exception):
    """A buffer is read at other points of the iteration space than it was written."""

    def __init__(self, buffer: str) -> None:
        super().__init__(f"{buffer} is read at other points than it is written")
        self.buffer = buffer


def remapped(
    nest: LoopNest, extents: Sequence[int], reduced_axes: int, axes: AxisMap, buffer_dtype: BufferDtype
) -> LoopNest:
    """The nest over other axes."""
    builder = BodyBuilder(extents, buffer_dtype)
    Transplant(builder).copy(nest, axes)
    body = without_dead_statements(builder.statements)
    return replace(nest, extents=tuple(extents), reduced_axes=reduced_axes, body=body)


def split_axis(nest: LoopNest, axis: int, inner: int, buffer_dtype: BufferDtype) -> LoopNest:
    """Cuts an axis into an outer one and an inner one of extent ``inner``, next to each other."""
    extents = list(nest.extents)
    extents[axis : axis + 1] = [extents[axis] // inner, inner]
    axes: list[list[tuple[int, int]]] = []
    for old in range(len(nest.extents)):
        if old == axis:
            axes.append([(old, inner), (old + 1, 1)])
        else:
            axes.append([(old if old < axis else old + 1, 1)])
    is_reduced = axis >= len(nest.extents) - nest.reduced_axes
    return remapped(nest, extents, nest.reduced_axes + is_reduced, axes, buffer_dtype)


def can_split(nest: LoopNest, axis: int) -> bool:
    """A position along a reduced axis cannot be found across two axes."""
    is_reduced = axis >= len(nest.extents) - nest.reduced_axes
    return not (is_reduced and _finds_position(nest))


def _finds_position(nest: LoopNest) -> bool:
    return any(isinstance(s, Reduce) and s.operation in ("argmax", "argmin") for s in nest.body)


def simplified(nest: LoopNest, buffer_dtype: BufferDtype) -> LoopNest:
    """Drops axes of extent 1, merges axes that every access and position walks as one, and orders them for memory.

    Parallel and reduced axes are each sorted by the strides of the accesses, the ones that move most elements
    first, so that the innermost axis has unit stride wherever there is a choice.
    """
    if not any(isinstance(statement, Reduce) for statement in nest.body) and not combined_buffers(nest):
        # The reduction was dead. (What is combined once a row must not be at each of its points.)
        nest = _without_reduction(nest)
    rank, parallel = len(nest.extents), len(nest.extents) - nest.reduced_axes
    keep_reduced = _finds_position(nest)
    kept = [a for a in range(rank) if nest.extents[a] != 1 or (keep_reduced and a >= parallel)]
    walked = accesses(nest)
    is_load = [isinstance(statement, Load) for statement in nest.body if isinstance(statement, (Load, Store))]
    extents = {axis: nest.extents[axis] for axis in kept}
    stride_of = {axis: [access.strides[axis] for access in walked] for axis in kept}
    positions = [statement.strides for statement in nest.body if isinstance(statement, Position)]
    walked_as = {axis: [*stride_of[axis], *(strides[axis] for strides in positions)] for axis in kept}
    merged = True
    while merged:
        merged = False
        for outer in extents:
            for inner in extents:
                if outer != inner and _walk_as_one(outer, inner, extents, walked_as, parallel, keep_reduced):
                    extents[inner] *= extents.pop(outer)
                    merged = True
                    break
            if merged:
                break
    reach_of = {axis: [steps[axis] for steps in reaches(nest)] for axis in kept}
    weights = [prod(nest.extents[a] for a in kept if reach_of[a][n]) for n in range(len(walked))]
    heavy_first = sorted(range(len(walked)), key=lambda n: (-weights[n], is_load[n]))

    def order(axis: int) -> tuple[int, ...]:
        return tuple(-abs(reach_of[axis][n]) for n in heavy_first)

    final = sorted((a for a in extents if a < parallel), key=order)
    reduced = sorted((a for a in extents if a >= parallel), key=order)
    places = {axis: place for place, axis in enumerate([*final, *reduced])}
    axes = [[(places[axis], 1)] if axis in places else [] for axis in range(rank)]
    new_extents = [extents[axis] for axis in [*final, *reduced]]
    return remapped(nest, new_extents, len(reduced), axes, buffer_dtype)


def _without_reduction(nest: LoopNest) -> LoopNest:
    """A nest that reduces nothing: its reduced axes are parallel ones if it stores along them, and else are not."""
    parallel = len(nest.extents) - nest.reduced_axes
    is_store = [
        isinstance(statement, Store) for statement in nest.body if isinstance(statement, (Load, Store))
    ]
    stores = list(compress(reaches(nest), is_store))
    extents = tuple(
        extent if axis < parallel or any(steps[axis] for steps in stores) else 1
        for axis, extent in enumerate(nest.extents)
    )
    return replace(nest, extents=extents, reduced_axes=0)


def reaches(nest: LoopNest) -> list[tuple[int, ...]]:
    """For each load and store how far a step along each axis moves it, at least if a gathered index moves there."""
    walked = accesses(nest)
    varied = varied_axes(nest) if any(access.gathers for access in walked) else []
    return [
        tuple(
            stride or max((abs(g.stride) for g in access.gathers if axis in varied[g.value]), default=0)
            for axis, stride in enumerate(access.strides)
        )
        for access in walked
    ]


def _walk_as_one(
    outer: int,
    inner: int,
    extents: dict[int, int],
    walked_as: dict[int, list[int]],
    parallel: int,
    keep_reduced: bool,
) -> bool:
    if (outer < parallel) != (inner < parallel):
        return False
    if keep_reduced and outer >= parallel:
        return False
    pairs = zip(walked_as[outer], walked_as[inner], strict=True)
    return all(far == near * extents[inner] for far, near in pairs)
