"""Finding out how the axes of two nests correspond.

Shared buffers tell: an axis that moves through a buffer with some stride and extent is the same as the other
nest's axis with this stride and extent. Where one nest walks as one axis what the other walks as two, the one
is cut. Axes that move through no shared buffer (those along which a reduced value is broadcast again)
correspond by extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gradsplit.compile_core.ir.loops import Access, Load, LoopNest, Store
from gradsplit.compile_core.lowering.nests.change_axes import BufferDtype, can_split, split_axis


class NoMatchError(Exception):
    """Why two nests have no common iteration space."""


@dataclass(frozen=True)
class Match:
    """Two nests, axes cut as needed, over one iteration space.

    Attributes:
        first, second: the nests.
        extents, reduced_axes: the common iteration space.
        first_axes, second_axes: the common axis of each of the nests' axes.
    """

    first: LoopNest
    second: LoopNest
    extents: tuple[int, ...]
    reduced_axes: int
    first_axes: tuple[int, ...]
    second_axes: tuple[int, ...]


def match(first: LoopNest, second: LoopNest, buffer_dtype: BufferDtype) -> Match:
    """Matches two nests, of which ``second`` runs later.

    Raises:
        NoMatchError: with the reason.
    """
    while True:
        cut = _wanted_cut(first, second)
        if cut is None:
            break
        # To cut a nest is to copy its body.
        _require(_have_as_many_points(first, second), "their iteration spaces differ")
        which, axis, inner = cut
        if which == 0:
            first = split_axis(first, axis, inner, buffer_dtype)
        else:
            second = split_axis(second, axis, inner, buffer_dtype)
    if first.reduced_axes and second.reduced_axes:
        pairing = _pair(first, second, same_kind=True)
        _require(len(pairing) == len(second.extents) == len(first.extents), "they reduce over different axes")
        return _onto(first, second, pairing)
    if second.reduced_axes:
        pairing = _pair(second, first, same_kind=False)
        _require_cover(second, first, pairing)
        inverse = _onto(second, first, pairing)
        return Match(
            first, second, inverse.extents, inverse.reduced_axes, inverse.second_axes, inverse.first_axes
        )
    pairing = _pair(first, second, same_kind=False)
    _require_cover(first, second, pairing)
    return _onto(first, second, pairing)


def _have_as_many_points(first: LoopNest, second: LoopNest) -> bool:
    """Whether two nests could have one iteration space, however they are cut."""
    if first.reduced_axes and second.reduced_axes:
        return _points(first) == _points(second)
    wide, narrow = (second, first) if second.reduced_axes else (first, second)
    parallel, reduced = _points(wide)
    return prod(narrow.extents) in (parallel, parallel * reduced)


def _points(nest: LoopNest) -> tuple[int, int]:
    """How many the parallel axes have, and how many the reduced ones."""
    parallel = len(nest.extents) - nest.reduced_axes
    return prod(nest.extents[:parallel]), prod(nest.extents[parallel:])


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NoMatchError(reason)


def _require_cover(wide: LoopNest, narrow: LoopNest, pairing: dict[int, int]) -> None:
    """``narrow`` (without reductions) must run over all parallel axes of ``wide``, and all or none of the
    reduced.
    """
    _require(len(pairing) == len(narrow.extents), "their iteration spaces differ")
    covered = set(pairing.values())
    parallel = len(wide.extents) - wide.reduced_axes
    _require(all(axis in covered for axis in range(parallel)), "one runs over fewer parallel axes")
    reduced = [axis in covered for axis in range(parallel, len(wide.extents))]
    _require(all(reduced) or not any(reduced), "one runs over some of the reduced axes only")


def _onto(wide: LoopNest, narrow: LoopNest, pairing: dict[int, int]) -> Match:
    return Match(
        wide,
        narrow,
        wide.extents,
        wide.reduced_axes,
        tuple(range(len(wide.extents))),
        tuple(pairing[axis] for axis in range(len(narrow.extents))),
    )


def _shared(first: LoopNest, second: LoopNest) -> list[tuple[Access, Access, bool]]:
    """Pairs of accesses to one buffer, and whether the second reads what the first stores."""
    pairs: list[tuple[Access, Access, bool]] = []
    stores = {s.access.buffer: s.access for s in first.body if isinstance(s, Store)}
    loads: dict[str, Access] = {}
    for statement in first.body:
        if isinstance(statement, Load) and not statement.access.gathers:
            loads.setdefault(statement.access.buffer, statement.access)
    seen: set[str] = set()
    for statement in second.body:
        if not isinstance(statement, Load) or statement.access.gathers or statement.access.buffer in seen:
            continue
        buffer = statement.access.buffer
        seen.add(buffer)
        if buffer in stores:
            pairs.append((stores[buffer], statement.access, True))
        elif buffer in loads:
            pairs.append((loads[buffer], statement.access, False))
    return pairs


def _wanted_cut(first: LoopNest, second: LoopNest) -> tuple[int, int, int] | None:
    """A cut ``(which nest, axis, inner extent)`` that brings the two nearer to each other."""
    nests = (first, second)
    for *both, is_flow in _shared(first, second):
        for which in (0, 1):
            nest, mine, theirs, other = nests[which], both[which], both[1 - which], nests[1 - which]
            edges = {
                edge for s, e in zip(theirs.strides, other.extents, strict=True) if s for edge in (s, s * e)
            }
            for axis, (stride, extent) in enumerate(zip(mine.strides, nest.extents, strict=True)):
                for edge in sorted(edges):
                    if stride <= 0 or not stride < edge < stride * extent:
                        continue
                    inner = edge // stride
                    if edge % stride == 0 and extent % inner == 0 and can_split(nest, axis):
                        return which, axis, inner
                    if is_flow:
                        raise NoMatchError(f"{mine.buffer} is walked in unlike steps")
    return None


def _pair(wide: LoopNest, narrow: LoopNest, same_kind: bool) -> dict[int, int]:
    """The axis of ``wide`` for each axis of ``narrow`` that has one."""
    # the earlier nest is the one whose stores the other reads
    forward = _shared(wide, narrow)
    backward = [(mine, theirs, flow) for theirs, mine, flow in _shared(narrow, wide) if flow]
    flows = [(mine, theirs) for mine, theirs, flow in [*forward, *backward] if flow]
    hints = [(mine, theirs) for mine, theirs, flow in forward if not flow]
    pairing: dict[int, int] = {}
    free = list(range(len(wide.extents)))
    ranked: list[tuple[int, int, int]] = []
    for axis in range(len(narrow.extents)):
        for candidate in free:
            if wide.extents[candidate] != narrow.extents[axis]:
                continue
            if same_kind and _is_reduced(wide, candidate) != _is_reduced(narrow, axis):
                continue
            if any(mine.strides[candidate] != theirs.strides[axis] for mine, theirs in flows):
                continue
            agreeing = sum(mine.strides[candidate] == theirs.strides[axis] for mine, theirs in hints)
            moving = sum(
                mine.strides[candidate] == theirs.strides[axis] != 0 for mine, theirs in [*flows, *hints]
            )
            ranked.append((-(agreeing + 2 * moving), axis, candidate))
    for _, axis, candidate in sorted(ranked):
        if axis not in pairing and candidate in free:
            pairing[axis] = candidate
            free.remove(candidate)
    return pairing


def _is_reduced(nest: LoopNest, axis: int) -> bool:
    return axis >= len(nest.extents) - nest.reduced_axes


def axis_terms(axes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """An axis map for axes that correspond one to one."""
    return [[(axis, 1)] for axis in axes]
