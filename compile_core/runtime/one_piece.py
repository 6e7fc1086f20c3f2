"""Memory in one piece for a forward that is recorded and the backward that is recorded within it.

Torch's allocator asks the driver for a piece of memory whenever a large allocation fits nowhere, and joins what is free
within a piece only. What a backward computes has other sizes than what its forward kept, piece by piece, so a seventh
of all memory lay idle, a quarter in Res2Net. Therefore the recording of such a forward begins with an allocation as
large as all that both return and keep, which is freed before anything is computed. What they compute on the way lies
there, too, as long as it fits: beside what is kept at first, where that was later. What does not fit lies in the memory
that recordings share, of which a piece is asked for in the same way: a network recorded layer by layer has that once.

What fits is told from when the programs allocate, by what torch's allocator does with that. What libraries take for
themselves is what they took when the program ran plainly (``meter_calls``); where more does not fit, the allocator asks
for further pieces as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory, sharing
from gradsplit.compile_core.runtime.memory_lives import Memory
from gradsplit.compile_core.runtime.meter_calls import CallMeter, may_be_metered
from gradsplit.compile_core.runtime.place_buffers import offsets
from gradsplit.compile_core.runtime.shared_memory import piece_of

# What is smaller lies in pieces that torch's allocator has for it; what is larger begins at multiples.
_LARGEST_SMALL_BYTES = 1 << 20
_ALIGNED_BYTES = 512
# Of a gap no fewer bytes remain.
_LEAST_REST_BYTES = _LARGEST_SMALL_BYTES + _ALIGNED_BYTES
# The allocator's own pieces: at least that for what is not very large, and what is larger in multiples.
_LEAST_PIECE_BYTES = 20 << 20
_VERY_LARGE_BYTES = 10 << 20
_PIECE_MULTIPLE_BYTES = 2 << 20
# A piece is so much larger, one part in, if then all fits: less than what sharing wastes.
_MOST_BEYOND = 64
_MOST_TRIES = 4
# Nothing is shared if it saves one part in so many of what lies apart then: a later pair would have to begin with it.
_LEAST_GAIN = 8
# Of allocations, in all that is tried: a second or less.
_MOST_PLACED = 300_000


@dataclass(frozen=True)
class Pieces:
    """Attributes:
    own_bytes, shared_bytes: how large they are, 0 for none.
    apart: temporaries that lie in the first one, by the name of their program.
    """

    own_bytes: int
    shared_bytes: int
    apart: Mapping[str, Collection[str]]


class InOnePiece:
    """A forward or a backward that is recorded with such pieces.

    Args:
        pieces: ``None`` if the backward is not recorded within the forward; then all temporaries are shared.
        is_first: whether the recording begins with the allocation of the pieces.
        meter: what looks at the first run, which is not recorded.
    """

    def __init__(
        self,
        program: Program,
        pieces: Callable[[], Pieces | None],
        *,
        is_first: bool,
        meter: CallMeter | None = None,
    ) -> None:
        self._program, self._pieces, self._is_first = program, pieces, is_first
        self._meter = meter

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        meter, self._meter = self._meter, None
        if meter is None or not may_be_metered():
            return self._program(inputs)
        return sharing(self._program, meter)(inputs)

    def sharing(self, memory: TemporaryMemory) -> Program:
        """See ``SharingProgram``; where the result is called, the current GPU is the program's."""
        pieces = self._pieces()
        if pieces is None:
            return sharing(self._program, memory)
        program = sharing(self._program, _PartOfTemporaries(memory, pieces.apart))
        if not self._is_first:
            return program

        def run(inputs: list[Any]) -> Sequence[Any]:
            # Where so much is not free in one piece, smaller ones may be.
            with suppress(torch.OutOfMemoryError):
                piece_of(pieces.own_bytes)
                memory.make_room(pieces.shared_bytes)
            return program(inputs)

        return run


@dataclass(frozen=True)
class _PartOfTemporaries:
    memory: TemporaryMemory
    names: Mapping[str, Collection[str]]

    def enter(self) -> None:
        self.memory.enter()

    def leave(self) -> None:
        self.memory.leave()

    def make_room(self, size: int) -> None:
        self.memory.make_room(size)

    def apart(self, program: str) -> Collection[str]:
        return self.names.get(program, ())


def may_be_split(pieces: Pieces) -> bool:
    """Whether torch's allocator puts smaller allocations there: it can be told not to, by ``max_split_size_mb``."""
    limit = torch.cuda.memory_stats().get("max_split_size", -1)
    return limit < 0 or max(pieces.own_bytes, pieces.shared_bytes) < limit


def pieces_for(memories: Sequence[Memory], pairs: int) -> Pieces:
    """For the memory of a forward and its backward, in the order in which it is allocated.

    Args:
        pairs: how many of such there are. If all of them need less so, nothing is shared: of what one keeps, little may
            be there yet, or any more, when its temporaries are largest.
    """
    large = [memory for memory in memories if memory.bytes > _LARGEST_SMALL_BYTES]
    own = {memory for memory in large if memory.outlasts}
    size = _piece_bytes([memory for memory in large if memory in own])
    most = _rounded(size + size // _MOST_BEYOND)
    temporaries = [memory for memory in large if memory not in own]
    # What one call makes lies in one place. First what is large and held long. All at once is tried first, as often
    # all fits but what lives beside most of what is kept; then halves, their halves, and so on.
    calls = [[*made] for _, made in groupby(temporaries, lambda memory: memory.begins)]
    calls = [made for made in calls if all(memory.buffers for memory in made)]
    parts = deque([sorted(calls, key=lambda made: -sum(map(_bytes_and_moments, made)))])
    placed = 0
    while parts and placed < _MOST_PLACED:
        part = parts.popleft()
        together = own.union(*part)
        placed += len(together)
        if not _bytes_beyond([memory for memory in large if memory in together], most):
            own = together
        elif len(part) > 1:
            half = len(part) // 2
            parts += [part[:half], part[half:]]
    own_bytes = _piece_bytes([memory for memory in large if memory in own], most)
    shared_bytes = _piece_bytes([memory for memory in large if memory not in own])
    everything = own.union(*calls)
    if len(everything) == len(large):
        all_bytes = _piece_bytes(large)
        more_bytes = (all_bytes - own_bytes) * pairs
        if more_bytes + more_bytes // _LEAST_GAIN < shared_bytes:
            own, own_bytes, shared_bytes = everything, all_bytes, 0
    names: dict[str, set[str]] = {}
    for memory in own:
        for program, buffer in memory.buffers:
            names.setdefault(program, set()).add(buffer)
    return Pieces(own_bytes, shared_bytes, names)


def _bytes_and_moments(memory: Memory) -> float:
    return memory.bytes * (memory.ends - memory.begins + 1)


def _piece_bytes(memories: Sequence[Memory], most: int | None = None) -> int:
    """How large a piece is in which they fit, ``most`` if that is known to do; else it may be a little too small."""
    size = _rounded(_bytes_beyond(memories))
    for _ in range(_MOST_TRIES):
        if most is not None and size >= most:
            return most
        # A piece with an end has smaller gaps at its end.
        beyond = _bytes_beyond(memories, size)
        if not beyond:
            return size
        size = _rounded(size + beyond)
    return size if most is None else most


def _rounded(size: int) -> int:
    if 0 < size < _VERY_LARGE_BYTES:
        return _LEAST_PIECE_BYTES
    return -(-size // _PIECE_MULTIPLE_BYTES) * _PIECE_MULTIPLE_BYTES


def _bytes_beyond(memories: Sequence[Memory], room: int = 0) -> int:
    """What they need beside a piece of that size, where each goes into the smallest gap, as with torch's allocator."""
    used = {memory: (memory.begins, memory.ends) for memory in memories}
    sizes = {memory: memory.bytes for memory in memories}
    return offsets(used, sizes, _ALIGNED_BYTES, _LEAST_REST_BYTES, [room])[1]
