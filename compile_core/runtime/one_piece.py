"""Memory in one piece for a forward that is recorded and the backward that is recorded within it.

Torch's allocator asks the driver for a piece of memory whenever a large allocation fits nowhere, and joins what is free
within a piece only. What a backward computes has other sizes than what its forward kept, piece by piece, so a seventh
of all memory lay idle, a quarter in Res2Net. Therefore the recording of such a forward begins with an allocation as
large as all that both need at once, which is freed before anything is computed. What the forward computes on the way
lies there, too, instead of in memory that recordings share: the backward computes where that was.

How much they need is told from their programs. What libraries take for themselves is not known: where it does not fit,
the allocator asks for further pieces as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.step_effects import reads
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory, sharing
from gradsplit.compile_core.runtime.executable import Executable
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Call,
    Free,
    Instructions,
    may_alias,
)
from gradsplit.compile_core.runtime.link_program import LinkedProgram
from gradsplit.compile_core.runtime.place_buffers import offsets, span_bytes

# What is smaller lies in pieces that torch's allocator has for it; what is larger begins at multiples.
_LARGEST_SMALL_BYTES = 1 << 20
_ALIGNED_BYTES = 512


class InOnePiece:
    """A forward whose recording leaves free memory for its backward.

    Args:
        program: the forward.
        room: bytes, or 0 if nothing is to be recorded within it; then its temporaries are shared.
    """

    def __init__(self, program: Program, room: Callable[[], int]) -> None:
        self._program, self._room = program, room

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._program(inputs)

    def sharing(self, memory: TemporaryMemory) -> Program:
        """See ``SharingProgram``; where it is called, the current GPU is the program's."""
        room = self._room()
        if not room:
            return sharing(self._program, memory)

        def run(inputs: list[Any]) -> Sequence[Any]:
            torch.empty(room, dtype=torch.uint8, device="cuda")
            return self._program(inputs)

        return run


def bytes_of_both(
    forward: Executable, backward: Executable, kept: Mapping[int, int], num_visible: int
) -> int:
    """What a forward and then its backward need at once of large memory; 0 if their programs do not say.

    Args:
        kept: position among the backward's inputs -> position among the forward's results.
        num_visible: how many of the first results are held by others.
    """
    lives = _Lives()
    results = lives.run(forward, [None] * len(forward.schedule.inputs))
    if results is None:
        return 0
    visible = {*results[:num_visible]}
    given: list[int | None] = [None] * len(backward.schedule.inputs)
    for position, k in kept.items():
        if results[k] not in visible:
            given[position] = lives.hold(results[k])
    lives.drop(memory for memory in results if memory not in visible)
    return 0 if lives.run(backward, given) is None else lives.most_bytes()


class _Lives:
    """When programs allocate memory, and when nobody holds it any more. A memory is a number, ``None`` what is not
    known or is somebody else's."""

    def __init__(self) -> None:
        self._time = 0
        self._bytes: list[int] = []
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}
        self._holders: Counter[int] = Counter()

    def hold(self, memory: int | None) -> int | None:
        if memory is not None:
            self._holders[memory] += 1
        return memory

    def drop(self, memories: Any) -> None:
        for memory in memories:
            if memory is not None:
                self._holders[memory] -= 1
                if not self._holders[memory]:
                    self._ends[memory] = self._time

    def run(self, executable: Executable, inputs: Sequence[int | None]) -> list[int | None] | None:
        """The results, held for the caller as the inputs were; ``None`` if a region's instructions are not known."""
        schedule = executable.schedule
        values = dict(zip(schedule.inputs, inputs, strict=True))
        for number, compute in enumerate(schedule.computes):
            region = executable.regions[compute.name]
            if not isinstance(region, LinkedProgram) or region.instructions is None:
                return None
            given = [self.hold(values[name]) for name in compute.inputs]
            still = {name for later in schedule.computes[number + 1 :] for name in later.inputs}
            still.update(name for name in schedule.outputs if name is not None)
            self.drop([values.pop(name) for name in {*values} - still])
            results = self._run_region(region.instructions(), given)
            values.update(zip(compute.outputs, results, strict=True))
        found = [None if name is None else self.hold(values[name]) for name in schedule.outputs]
        self.drop(values.values())
        return found

    def _run_region(self, instructions: Instructions, given: Sequence[int | None]) -> list[int | None]:
        held = dict(zip(instructions.given, given, strict=False))
        for step in instructions.steps:
            self._time += 1
            match step:
                case Allocate(buffer, taken):
                    old = next((held[name] for name in taken if self._is_held_once(held.get(name))), None)
                    held[buffer] = self._made(instructions, buffer) if old is None else self.hold(old)
                case Call(call) if not call.out:
                    given_memory = next(
                        (held[name] for name in sorted(reads(call)) if held.get(name) is not None), None
                    )
                    for name in filter(None, call.outputs):
                        is_view = may_alias(call.target) and given_memory is not None
                        held[name] = self.hold(given_memory) if is_view else self._made(instructions, name)
                case Free(buffers):
                    self.drop([held.pop(name, None) for name in buffers])
                case _:
                    pass
        views = [
            None if view is None else instructions.in_owner(view) for view in instructions.program.outputs
        ]
        results = [None if view is None else self.hold(held.get(view.buffer)) for view in views]
        self._time += 1
        self.drop(held.values())
        return results

    def _is_held_once(self, memory: int | None) -> bool:
        return memory is not None and self._holders[memory] == 1

    def _made(self, instructions: Instructions, buffer: str) -> int | None:
        self._bytes.append(span_bytes(instructions.buffers[buffer]))
        self._begins.append(self._time)
        return self.hold(len(self._bytes) - 1)

    def most_bytes(self) -> int:
        """Where each large allocation is put into the smallest gap, as torch's allocator does."""
        large = [memory for memory, size in enumerate(self._bytes) if size > _LARGEST_SMALL_BYTES]
        used = {
            str(memory): (self._begins[memory], self._ends.get(memory, self._time) - 1) for memory in large
        }
        sizes = {str(memory): self._bytes[memory] for memory in large}
        return offsets(used, sizes, _ALIGNED_BYTES, _LARGEST_SMALL_BYTES)[1]
