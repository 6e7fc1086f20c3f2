"""One kernel for nests that do the same to other buffers, as an optimizer does to its parameters.

Nests without reductions over at most one axis whose statements are equal but for the buffers' names become one
``NestBatch``, whatever their sizes, if none needs another's result. They are found by a key, the print of their
statements with the buffers numbered. All buffers of a batch exist at the same time, so only few bytes of temporaries
may be among them: a batch saves the start of kernels, which is worth little where buffers are large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compile_core.ir.loops import Load, LoopNest, LoopProgram, NestBatch, Step, Store
from compile_core.ir.step_effects import reads, writes
from compile_core.ir.tensor_spec import TensorSpec
from compile_core.lowering.passes import buffers_of
from compile_core.lowering.step_order import direct_dependencies, topological_order

_MOST_TEMPORARY_BYTES = 1 << 24


def batch_nests(program: LoopProgram) -> LoopProgram:
    """Joins nests into batches; the program computes the same."""
    alike: dict[str, list[int]] = {}
    for number, step in enumerate(program.steps):
        key = batch_key(step, program.buffers)
        if key is not None:
            alike.setdefault(key, []).append(number)
    candidates = [numbers for numbers in alike.values() if len(numbers) > 1]
    return _Batching(program).run(candidates) if candidates else program


def batch_key(step: Step, buffers: Mapping[str, TensorSpec]) -> str | None:
    """What nests of one batch have in common; ``None`` for a step that can be in none."""
    if not isinstance(step, LoopNest) or step.reduced_axes or len(step.extents) > 1:
        return None
    names = buffers_of(step)
    if any(buffers[name].device.type != "cpu" for name in names):
        return None
    numbered = {name: f"{k}" for k, name in enumerate(names)}
    body = []
    for statement in step.body:
        if isinstance(statement, Load | Store):
            if statement.access.gathers:
                return None
            access = replace(statement.access, buffer=numbered[statement.access.buffer])
            statement = replace(statement, access=access)
        body.append(statement)
    # The print of a number tells 0.0 from -0.0, and 1 from True.
    return repr((len(step.extents), [buffers[name].dtype for name in names], body))


class _Batching:
    """Steps by number; a batch takes the place of its first member.

    Attributes:
        direct: the steps that a step directly depends on.
        position: where a step, or the last member of a batch, was at the beginning.
    """

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.steps: dict[int, Step] = dict(enumerate(program.steps))
        self.direct = dict(enumerate(direct_dependencies(program.steps)))
        self.position = {number: number for number in self.steps}
        returned = {view.buffer for view in program.outputs if view is not None}
        self.kept = {*returned, *program.inputs, *program.destinations, *program.constants}

    def run(self, candidates: Sequence[Sequence[int]]) -> LoopProgram:
        for alike in candidates:
            left = list(alike)
            while len(left) > 1:
                batch = self._independent(left)
                left = [number for number in left if number not in batch]
                if len(batch) > 1:
                    self._join(batch)
        order = topological_order(self.direct, self.position)
        return replace(self.program, steps=tuple(self.steps[number] for number in order))

    def _independent(self, numbers: Sequence[int]) -> list[int]:
        """The first of these steps, and those of the others that it can be run together with."""
        before = self._all_before()
        batch: list[int] = []
        chosen = temporary_bytes = 0
        for number in sorted(numbers, key=lambda number: before[number].bit_count()):
            size = self._temporary_bytes(number)
            depends = before[number] & chosen or any(before[other] >> number & 1 for other in batch)
            if depends or (batch and temporary_bytes + size > _MOST_TEMPORARY_BYTES):
                continue
            batch.append(number)
            chosen |= 1 << number
            temporary_bytes += size
        return sorted(batch)

    def _all_before(self) -> dict[int, int]:
        """All steps that must run before a step, as a bit set over step numbers."""
        before: dict[int, int] = {}
        for number in topological_order(self.direct, self.position):
            before[number] = 0
            for other in self.direct[number]:
                before[number] |= before[other] | 1 << other
        return before

    def _temporary_bytes(self, number: int) -> int:
        step = self.steps[number]
        return sum(self.program.buffers[name].bytes for name in (reads(step) | writes(step)) - self.kept)

    def _join(self, batch: Sequence[int]) -> None:
        first, gone = batch[0], set(batch[1:])
        members = tuple(step for number in batch if isinstance(step := self.steps[number], LoopNest))
        self.steps[first] = NestBatch(f"{members[0].name}_batch_of_{len(members)}", members)
        self.position[first] = batch[-1]
        self.direct[first] = set[int]().union(*(self.direct[number] for number in batch)) - {first, *gone}
        for number in gone:
            del self.steps[number], self.direct[number], self.position[number]
        for direct in self.direct.values():
            if direct & gone:
                direct -= gone
                direct.add(first)
        self.direct[first].discard(first)
