"""Gives small temporaries places in one buffer, so that a hundred of them cost one allocation.

An allocation takes as long as a launch, and half of a network's temporaries are a few kilobytes: statistics of
channels, parts of sums. Those that only kernels touch need no tensor of their own. Kernels run in order, so two that
are not in use at the same time share a place. The buffer is held from the first use of one to the last; it is no more
than a few times what is the limit for each.

Results that a forward keeps for its backward lie in one buffer, too, each in a place of its own; what is returned are
views of it. It is held until the last of them is used, so only those are in it that are smaller still.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

import torch

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

_LARGEST_BYTES = 1 << 17
_LARGEST_RESULT_BYTES = 1 << 14
_ALIGNED_BYTES = 128

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class BufferPlace:
    """Where a buffer lies: its offset in bytes from the beginning of another."""

    buffer: str
    offset_bytes: int


@dataclass(frozen=True)
class Placement:
    """Attributes:
    places: of the buffers that have no memory of their own.
    buffers: those in which they lie.
    """

    places: Mapping[str, BufferPlace]
    buffers: Mapping[str, TensorSpec]


def place_buffers(program: LoopProgram) -> Placement:
    """Places for what is small and only kernels touch: temporaries, and results that are kept for another program."""
    touched = _positions_in_use(program)
    results = _kept_results(program)
    visible = {view.buffer for view in program.outputs if view is not None} - results
    groups: dict[tuple[str, torch.device, torch.dtype], dict[str, tuple[int, int]]] = {}
    for name, (first, last) in touched.items():
        spec = program.buffers[name]
        if name in results:
            # To the end, and of the buffer's own dtype, since views of it are returned.
            if span_bytes(spec) <= _LARGEST_RESULT_BYTES:
                group = ("small_results", spec.device, spec.dtype)
                groups.setdefault(group, {})[name] = (first, len(program.steps))
        elif name not in visible:
            groups.setdefault(("small_buffers", spec.device, torch.uint8), {})[name] = (first, last)
    places: dict[str, BufferPlace] = {}
    buffers: dict[str, TensorSpec] = {}
    for (kind, device, dtype), used in sorted(groups.items(), key=str):
        if len(used) < 2:
            continue
        whole = f"{kind}_{len(buffers)}"
        sizes = {name: span_bytes(program.buffers[name]) for name in used}
        found, size = offsets(used, sizes, _ALIGNED_BYTES)
        buffers[whole] = TensorSpec.contiguous((size // dtype.itemsize,), dtype, device)
        places |= {name: BufferPlace(whole, offset) for name, offset in found.items()}
    return Placement(places, buffers)


def _kept_results(program: LoopProgram) -> set[str]:
    """The results that may share memory, as nobody sees them."""
    returned = Counter(view.buffer for view in program.outputs if view is not None)
    kept = Counter(
        view.buffer for k, view in enumerate(program.outputs) if view is not None and k in program.kept
    )
    return {name for name, count in kept.items() if returned[name] == count}


def _positions_in_use(program: LoopProgram) -> dict[str, tuple[int, int]]:
    """The first and the last step that touch each small buffer that only kernels touch."""
    excluded = {*program.inputs, *program.destinations, *program.constants}
    used: dict[str, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        touched = reads(step) | writes(step)
        if isinstance(step, ExternCall):
            excluded |= touched
        else:
            used |= {name: (used.get(name, (position, position))[0], position) for name in sorted(touched)}
    return {
        name: positions
        for name, positions in used.items()
        if name not in excluded and span_bytes(program.buffers[name]) <= _LARGEST_BYTES
    }


def offsets(
    used: Mapping[Name, tuple[float, float]],
    sizes: Mapping[Name, int],
    aligned_bytes: int,
    least_rest: int | None = None,
    room: Sequence[int] = (),
) -> tuple[dict[Name, int], int]:
    """Each in the first gap between those in use when it begins, and the size of the whole.

    Args:
        least_rest: for what torch's allocator does, which takes the smallest gap, and all of it if fewer bytes remain.
        room: sizes of further gaps, which have offsets below 0 and count for nothing.
    """
    found: dict[Name, int] = {}
    living: list[tuple[float, int, int]] = []  # last position, offset, end
    gaps: list[tuple[float, float]] = [(0, math.inf)]  # in order, each apart from the next
    for size in room:
        end = gaps[0][0] - 1
        gaps.insert(0, (end - size, end))
    whole = 0
    for name, (first, last) in sorted(used.items(), key=lambda item: item[1][0]):
        while living and living[0][0] < first:
            _, offset, end = heappop(living)
            _add_gap(gaps, offset, end)
        size = -(-sizes[name] // aligned_bytes) * aligned_bytes
        if not size:
            found[name] = 0
            continue
        fitting = (number for number, (begin, end) in enumerate(gaps) if end - begin >= size)
        if least_rest is None:
            number = next(fitting)
            begin, end = gaps[number]
        else:
            number = min(fitting, key=lambda number: gaps[number][1] - gaps[number][0])
            begin, end = gaps[number]
            size = size if end - begin - size >= least_rest else int(end - begin)
        gaps[number : number + 1] = [(begin + size, end)] if begin + size < end else []
        found[name] = int(begin)
        heappush(living, (last, int(begin), int(begin) + size))
        whole = max(whole, int(begin) + size)
    return found, whole


def _add_gap(gaps: list[tuple[float, float]], begin: float, end: float) -> None:
    number = bisect(gaps, (begin, end))
    if gaps[number][0] == end:
        end = gaps.pop(number)[1]
    if number and gaps[number - 1][1] == begin:
        begin = gaps.pop(number := number - 1)[0]
    gaps.insert(number, (begin, end))


def span_bytes(spec: TensorSpec) -> int:
    return spec.span * spec.dtype.itemsize
