"""When a forward and its backward, run one after the other, allocate memory, and until when somebody holds it.

It is told from their programs, and what libraries take for themselves from a run of them, if there was one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.ir.step_effects import reads
from gradsplit.compile_core.runtime.executable import Executable
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Call,
    Free,
    Instructions,
    may_alias,
)
from gradsplit.compile_core.runtime.link_program import LinkedProgram
from gradsplit.compile_core.runtime.meter_calls import parts
from gradsplit.compile_core.runtime.place_buffers import span_bytes
from gradsplit.compile_core.runtime.share_temporaries import in_own_memory, makes_temporaries


@dataclass(eq=False)
class Memory:
    """Attributes:
    begins, ends: the first and the last moment at which it is held.
    buffers: what lies there, by the name of the program.
    outlasts: whether a result does.
    """

    bytes: int
    begins: int
    ends: float = math.inf
    buffers: set[tuple[str, str]] = field(default_factory=set)
    outlasts: bool = False
    holders: int = 0


def memory_of_both(
    forward: Executable,
    backward: Executable,
    kept: Mapping[int, int],
    num_visible: int,
    taken: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[Memory] | None:
    """In the order in which it is allocated; ``None`` if their programs do not say.

    Args:
        kept: position among the backward's inputs -> position among the forward's results.
        num_visible: how many of the first results are held by others.
        taken: bytes that calls take on the way; see ``CallMeter``.
    """
    lives = _Lives(taken)
    results = lives.run(forward, [None] * len(forward.schedule.inputs))
    if results is None:
        return None
    visible = {*results[:num_visible]}
    given: list[Memory | None] = [None] * len(backward.schedule.inputs)
    for position, k in kept.items():
        if results[k] not in visible:
            given[position] = _held(results[k])
    lives.drop(memory for memory in results if memory not in visible)
    return None if lives.run(backward, given) is None else lives.made


class _Lives:
    """What is not known or is somebody else's is ``None``.

    Attributes:
        made: what was allocated.
    """

    def __init__(self, taken: Mapping[str, Sequence[int]]) -> None:
        self._taken = taken
        self._time = 0
        self.made: list[Memory] = []

    def drop(self, memories: Iterable[Memory | None]) -> None:
        for memory in memories:
            if memory is not None:
                memory.holders -= 1
                if not memory.holders:
                    memory.ends = self._time - 1

    def run(self, executable: Executable, inputs: Sequence[Memory | None]) -> list[Memory | None] | None:
        """The results, held for the caller as the inputs were; ``None`` if a region's instructions are not known."""
        schedule = executable.schedule
        values = dict(zip(schedule.inputs, inputs, strict=True))
        for number, compute in enumerate(schedule.computes):
            region = executable.regions[compute.name]
            if not isinstance(region, LinkedProgram) or region.instructions is None:
                return None
            given = [_held(values[name]) for name in compute.inputs]
            still = {name for later in schedule.computes[number + 1 :] for name in later.inputs}
            still.update(name for name in schedule.outputs if name is not None)
            self.drop([values.pop(name) for name in {*values} - still])
            results = self._run_region(region.instructions(), given)
            values.update(zip(compute.outputs, results, strict=True))
        found = [None if name is None else _held(values[name]) for name in schedule.outputs]
        self.drop(values.values())
        return found

    def _run_region(self, instructions: Instructions, given: Sequence[Memory | None]) -> list[Memory | None]:
        program, own = instructions.program, in_own_memory(instructions)
        held = dict(zip(instructions.given, given, strict=False))
        taken_by_parts = iter(self._taken.get(program.name, ()))

        def hold(buffer: str, memory: Memory | None, outlasts: bool) -> None:
            memory = memory or self._made(span_bytes(instructions.buffers[buffer]))
            memory.buffers.add((program.name, buffer))
            memory.outlasts |= outlasts
            held[buffer] = _held(memory)

        for step in instructions.steps:
            self._time += 1
            match step:
                case Allocate(buffer, taken):
                    hold(buffer, next(filter(_is_held_once, map(held.get, taken)), None), buffer in own)
                case Call(call) if not call.out:
                    given_memory = next(filter(None, map(held.get, sorted(reads(call)))), None)
                    for name in filter(None, call.outputs):
                        outlasts = not makes_temporaries(call, own)
                        hold(name, given_memory if may_alias(call.target) else None, outlasts)
                    size = max(next(taken_by_parts, 0) for _ in parts(call))
                    self._take(size, program.name, call, own)
                case Free(buffers):
                    self.drop([held.pop(name, None) for name in buffers])
                case _:
                    pass
        views = [None if view is None else instructions.in_owner(view) for view in program.outputs]
        results = [None if view is None else _held(held.get(view.buffer)) for view in views]
        self._time += 1
        self.drop(held.values())
        return results

    def _take(self, size: int, program: str, call: ExternCall, own: set[str]) -> None:
        """What a call takes lies where its results do, while it runs."""
        if size:
            taken = self._made(size)
            taken.ends, taken.outlasts = self._time, not makes_temporaries(call, own)
            if not may_alias(call.target):
                taken.buffers.update((program, name) for name in call.outputs if name is not None)

    def _made(self, size: int) -> Memory:
        self.made.append(Memory(size, self._time))
        return self.made[-1]


def _held(memory: Memory | None) -> Memory | None:
    if memory is not None:
        memory.holders += 1
    return memory


def _is_held_once(memory: Memory | None) -> bool:
    return memory is not None and memory.holders == 1
