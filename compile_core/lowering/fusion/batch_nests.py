"""One kernel for nests that do the same to other buffers, as an optimizer does to its parameters.

Nests whose statements are equal but for the buffers' names, and where they begin in them, become one ``NestBatch`` if
none needs another's result: over one axis whatever its length, on a GPU also over several axes of the same lengths,
with reductions or without. They are found by a key, the print of their statements with the buffers numbered.

The members of a batch run at one place, where the first or the last of them was, so that some of them run earlier or
later than they would. What is held in memory for that in the meantime may be few bytes: a batch saves the start of
kernels, which is worth little where buffers are large. An input that is read for the last time counts, too, as it may
be what the backward gets from the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from gradsplit.compile_core.ir.loops import (
    LoopNest,
    LoopProgram,
    NestBatch,
    Step,
    accesses,
    combined_buffers,
    with_accesses,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.fusion.overwrite_inputs import cannot_fail
from gradsplit.compile_core.lowering.fusion.pieces import in_pieces
from gradsplit.compile_core.lowering.fusion.step_order import (
    Dependencies,
    direct_dependencies,
    topological_order,
)
from gradsplit.compile_core.lowering.nests.kernel_bases import separated
from gradsplit.compile_core.lowering.nests.order_axes import simplify
from gradsplit.compile_core.lowering.nests.passes import buffers_of

_MOST_HELD_BYTES = 1 << 24
# On a GPU each is an argument of the kernel, of which there may be 4 KiB, and each takes time to compile.
_MOST_POINTERS = 256
# A buffer that some members have in common is as many arguments.
_MOST_ARGUMENTS = 480


def batch_nests(program: LoopProgram) -> LoopProgram:
    """Joins nests into batches; the program computes the same."""
    return in_pieces(program, _with_batches)


def _with_batches(program: LoopProgram) -> LoopProgram:
    alike: dict[str, list[int]] = {}
    for number, step in enumerate(program.steps):
        key = batch_key(step, program.buffers)
        if key is not None:
            alike.setdefault(key, []).append(number)
    candidates = [numbers for numbers in alike.values() if len(numbers) > 1]
    return _Batching(program).run(candidates) if candidates else program


def batch_key(step: Step, buffers: Mapping[str, TensorSpec]) -> str | None:
    """What nests of one batch have in common; ``None`` for a step that can be in none."""
    if not isinstance(step, LoopNest):
        return None
    specs = [buffers[name] for name in buffers_of(step)]
    kinds = {spec.device.type for spec in specs}
    if kinds == {"cuda"}:
        step, places = separated(simplify(step), buffers)
        specs = [buffers[name] for name, _ in places.values()]
    elif kinds != {"cpu"} or step.reduced_axes or len(step.extents) > 1:
        return None
    elif any(access.gathers for access in accesses(step)) or combined_buffers(step):
        # C++ kernels stop at an index that is out of range, and threads share a batch's elements by number.
        return None
    space: object = len(step.extents)
    if len(step.extents) > 1 or step.reduced_axes:
        space = (step.extents, step.reduced_axes)
    elif kinds == {"cuda"}:
        # One odd size would cost all members their wide accesses.
        space = (space, prod(step.extents) % 16 == 0)
    numbered = {name: f"{k}" for k, name in enumerate(buffers_of(step))}
    body = list(with_accesses(step.body, lambda access: replace(access, buffer=numbered[access.buffer])))
    # The print of a number distinguishes 0.0 from -0.0, and 1 from True.
    return repr((space, [(spec.dtype, spec.device) for spec in specs], body))


@dataclass
class _Gathered:
    """Members of a batch to be, and the steps ``after`` and ``until`` between which it must run."""

    members: list[int]
    after: float
    until: float


class _Batching:
    """Steps by number; a batch takes the place of its first member.

    Attributes:
        order: which steps must run before which.
        position: where a step runs, among the places that the steps had at the beginning.
        read, written: the buffers of a step.
        last_reader: by buffer, the step that reads it last.
    """

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.steps: dict[int, Step] = dict(enumerate(program.steps))
        self.order = Dependencies(self._direct_dependencies())
        self.position: dict[int, float] = {number: number for number in self.steps}
        self.read = {number: reads(step) for number, step in self.steps.items()}
        self.written = {number: writes(step) for number, step in self.steps.items()}
        self.last_reader: dict[str, int] = {}
        for number in self.steps:
            self.last_reader.update(dict.fromkeys(self.read[number], number))
        returned = {view.buffer for view in program.outputs if view is not None}
        self.kept = {*returned, *program.destinations, *program.constants}

    def _direct_dependencies(self) -> list[set[int]]:
        """What might fail stays before the inputs get new values, too; see ``overwrite_inputs``."""
        direct = direct_dependencies(self.program.steps)
        if self.program.overwritten:
            failing = {number for number, step in self.steps.items() if not cannot_fail(step)}
            for number, step in self.steps.items():
                if not writes(step).isdisjoint(self.program.overwritten):
                    direct[number] |= failing
        return direct

    def run(self, candidates: Sequence[Sequence[int]]) -> LoopProgram:
        for alike in candidates:
            left = list(alike)
            while len(left) > 1:
                batch = self._gather(left)
                left = [number for number in left if number not in batch.members]
                if len(batch.members) > 1:
                    self._join(batch)
        order = topological_order(self.order.direct, self.position)
        return replace(self.program, steps=tuple(self.steps[number] for number in order))

    def _gather(self, numbers: Sequence[int]) -> _Gathered:
        """The first of these steps, and those of the others that it can be run together with."""
        batch = _Gathered([], -1, len(self.program.steps))
        chosen = before = touched_bytes = most_places = 0
        touched: set[str] = set()
        written: set[str] = set()
        for number in numbers:
            names = self.read[number] | self.written[number]
            # A batch made before may have put a later step before an earlier one.
            if self.order.before[number] & chosen or before >> number & 1 or written & self.written[number]:
                continue
            on_gpu = any(self.program.buffers[name].device.type == "cuda" for name in names)
            if on_gpu and len(touched | names) > _MOST_POINTERS:
                break
            # All of a batch have as many.
            most_places = most_places or (self._most_places(number) if on_gpu else 0)
            if (len(batch.members) + 1) * most_places > _MOST_ARGUMENTS:
                break
            more = _Gathered(
                [*batch.members, number],
                max((self.position[other] for other in self.order.direct[number]), default=-1),
                min((self.position[other] for other in self.order.followers[number]), default=batch.until),
            )
            more.after, more.until = max(batch.after, more.after), min(batch.until, more.until)
            touched_bytes += sum(self.program.buffers[name].bytes for name in names)
            may_hold_much = batch.members and touched_bytes > _MOST_HELD_BYTES
            if may_hold_much and self._held_bytes(more, self._place(more)) > _MOST_HELD_BYTES:
                continue
            batch = more
            chosen |= 1 << number
            before |= self.order.before[number]
            touched |= names
            written |= self.written[number]
        return batch

    def _most_places(self, number: int) -> int:
        """What a nest is given at most: its buffers, and the single elements that it reads."""
        step = self.steps[number]
        assert isinstance(step, LoopNest)
        walks = [(access, any(access.strides) or bool(access.gathers)) for access in accesses(step)]
        return len({(access.buffer, None if walked else access.offset) for access, walked in walks})

    def _place(self, batch: _Gathered) -> float:
        """Where a batch is to run: at one end of where it can, that at which less is held."""
        latest = min(self.position[batch.members[-1]], batch.until - 0.5)
        earliest = max(self.position[batch.members[0]], batch.after + 0.5)
        if earliest >= latest:
            return earliest  # what needs its results waits
        return min((latest, earliest), key=lambda place: self._held_bytes(batch, place))

    def _held_bytes(self, batch: _Gathered, place: float) -> int:
        """What would be free before ``place``, or not yet there at it, if the members ran where they were. What the
        program returns is not there before it is written."""
        names: set[str] = set()
        for number in batch.members:
            position = self.position[number]
            if position < place:
                read = self.read[number]
                names |= {name for name in read - self.kept if self.position[self.last_reader[name]] < place}
            elif position > place:
                names |= self.written[number].difference(self.program.overwritten, self.program.destinations)
        return sum(self.program.buffers[name].bytes for name in names)

    def _join(self, batch: _Gathered) -> None:
        first, *others = batch.members
        place = self._place(batch)
        self.steps[first] = self._joined(batch.members)
        self.position[first] = place
        self.order.join(batch.members, first)
        for number in others:
            del self.steps[number]
        for kinds in (self.read, self.written):
            kinds[first] = kinds[first].union(*(kinds.pop(number) for number in others))
        for name in self.read[first]:
            if self.last_reader[name] in others or self.position[self.last_reader[name]] < place:
                self.last_reader[name] = first

    def _joined(self, numbers: Sequence[int]) -> NestBatch:
        members: list[LoopNest] = []
        for number in numbers:
            step = self.steps[number]
            assert isinstance(step, LoopNest)
            on_gpu = self.program.buffers[buffers_of(step)[0]].device.type == "cuda"
            members.append(simplify(step) if on_gpu else step)
        return NestBatch(f"{members[0].name}_batch_of_{len(members)}", tuple(members))
