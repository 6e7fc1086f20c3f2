"""Gives small temporaries places in one buffer, so that a hundred of them cost one allocation.

An allocation takes as long as a launch, and half of a network's temporaries are a few kilobytes: statistics of
channels, parts of sums. Those that only kernels touch need no tensor of their own. Kernels run in order, so two that
are not in use at the same time share a place. The buffer is held from the first use of one to the last; it is no more
than a few times what is the limit for each.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compile_core.ir.loops import ExternCall, LoopProgram
from compile_core.ir.step_effects import reads, writes
from compile_core.ir.tensor_spec import TensorSpec

_LARGEST_BYTES = 1 << 17
_ALIGNED_BYTES = 128


@dataclass(frozen=True)
class Place:
    """Where a buffer lies: so many bytes behind the beginning of another."""

    buffer: str
    offset_bytes: int


@dataclass(frozen=True)
class Placement:
    """Attributes:
    places: of the buffers that have no memory of their own.
    buffers: those in which they lie.
    """

    places: Mapping[str, Place]
    buffers: Mapping[str, TensorSpec]


def place_buffers(program: LoopProgram) -> Placement:
    """Places for the small temporaries that only kernels touch."""
    used = _positions_in_use(program)
    devices = {program.buffers[name].device for name in used}
    places: dict[str, Place] = {}
    buffers: dict[str, TensorSpec] = {}
    for device in sorted(devices, key=str):
        here = {name: positions for name, positions in used.items() if program.buffers[name].device == device}
        if len(here) < 2:
            continue
        name = f"small_buffers_{len(buffers)}"
        offsets, size = _offsets(here, {name: _bytes_of(program.buffers[name]) for name in here})
        buffers[name] = TensorSpec.contiguous((size,), torch.uint8, device)
        places |= {small: Place(name, offset) for small, offset in offsets.items()}
    return Placement(places, buffers)


def _positions_in_use(program: LoopProgram) -> dict[str, tuple[int, int]]:
    """The first and the last step that touch each such buffer."""
    excluded = {*program.inputs, *program.destinations, *program.constants}
    excluded |= {view.buffer for view in program.outputs if view is not None}
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
        if name not in excluded and _bytes_of(program.buffers[name]) <= _LARGEST_BYTES
    }


def _offsets(used: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Each in the first gap between those in use when it begins, and the size of the whole."""
    offsets: dict[str, int] = {}
    living: list[tuple[int, int, int]] = []  # offset, end, last position
    whole = 0
    for name, (first, last) in sorted(used.items(), key=lambda item: item[1][0]):
        living = [entry for entry in living if entry[2] >= first]
        offset = 0
        for begin, end, _ in living:
            if begin - offset >= sizes[name]:
                break
            offset = max(offset, end)
        end = offset + -(-sizes[name] // _ALIGNED_BYTES) * _ALIGNED_BYTES
        insort(living, (offset, end, last))
        offsets[name] = offset
        whole = max(whole, end)
    return offsets, whole


def _bytes_of(spec: TensorSpec) -> int:
    """All that a buffer spans."""
    if spec.numel == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.dtype.itemsize
