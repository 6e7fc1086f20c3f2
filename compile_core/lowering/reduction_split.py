"""Cutting a reduction in two where it would leave most of the machine idle.

A sum over all elements, or over the rows of a narrow matrix, has few results and thus few independent loops.
It becomes a first reduction over chunks, many of which run at once, and a second one over the chunks'
results; the first stays open to fusion with what produces its argument. Sums of floats may be reassociated,
and chunked sums are more accurate than running ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

# A GPU of some 130 multiprocessors wants about this many programs; one takes about this many columns.
_GPU_PROGRAMS = 512
_COLUMNS_PER_PROGRAM = 64
# Shortest chunks: along memory, and across it.
_GPU_SHORTEST_ROW = 1024
_GPU_SHORTEST_COLUMN = 32
# A CPU wants a few chunks per core, each worth starting a thread for.
_CPU_LOOPS = 64
_CPU_ENOUGH_LOOPS = 16
_CPU_SHORTEST = 4096


@dataclass(frozen=True)
class ReductionSplit:
    """How to view the argument, and which dims of this view each of the two stages reduces.

    Attributes:
        shape: the argument's shape with one dim cut.
        inner: dims that the first stage reduces.
        outer: dims of the first stage's result (which has the dims that are left, in order) that the second
            reduces.
    """

    shape: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]


def split_reduction(shape: Sequence[int], dims: Sequence[int], device: torch.device) -> ReductionSplit | None:
    """A split of the reduction of ``dims``, or ``None`` where one loop does well."""
    chunks = _wanted_chunks(shape, dims, device)
    new_shape: list[int] = []
    inner: list[int] = []
    outer: list[int] = []
    left = chunks
    for d, size in enumerate(shape):
        taken = (
            max((n for n in range(1, min(size, left) + 1) if size % n == 0), default=1) if d in dims else 1
        )
        if d not in dims:
            new_shape.append(size)
            continue
        left = left // taken if taken == size else 1
        if taken > 1:
            outer.append(len(new_shape))
            new_shape.append(taken)
        if taken < size or size == 1:
            inner.append(len(new_shape))
            new_shape.append(size // taken)
    if not outer or not inner:
        return None
    kept = [d for d in range(len(new_shape)) if d not in inner]
    return ReductionSplit(tuple(new_shape), tuple(inner), tuple(kept.index(d) for d in outer))


def _wanted_chunks(shape: Sequence[int], dims: Sequence[int], device: torch.device) -> int:
    count = prod(shape[d] for d in dims)
    results = prod(size for d, size in enumerate(shape) if d not in dims)
    wide = [d for d, size in enumerate(shape) if size > 1]
    along_memory = bool(wide) and wide[-1] in dims
    if device.type == "cpu":
        return 1 if results >= _CPU_ENOUGH_LOOPS else min(_CPU_LOOPS, count // _CPU_SHORTEST)
    programs = results if along_memory else max(results // _COLUMNS_PER_PROGRAM, 1)
    shortest = _GPU_SHORTEST_ROW if along_memory else _GPU_SHORTEST_COLUMN
    return min(_GPU_PROGRAMS // programs, count // shortest)
