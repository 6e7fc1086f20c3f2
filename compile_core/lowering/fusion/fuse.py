"""Stage 5, second half: fewer nests that move fewer bytes.

Pairs of nests that touch a common buffer are candidates. The one that promises to save most bytes is joined
first, if the two have a common iteration space and no other step must run between them; joining repeats until
nothing is left. A load of what the joined nest itself stored becomes the stored value; a temporary that
nobody reads any more is not stored at all. Joined nests have one body, so equal loads and operations of both
happen once.

The greedy order by bytes follows the "fusion for memory" heuristics of Kennedy & McKinley (1994) and
TorchInductor's scheduler. Its limits: no nest is split or recomputed here, and a nest has one set of reduced
axes, so row sums and column sums of one matrix stay apart here (``join_columns.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from gradsplit.compile_core.ir.loops import (
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    Refusal,
    Step,
    Store,
    accesses,
    additions,
    combined_buffers,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_key
from gradsplit.compile_core.lowering.fusion.one_term_sums import without_one_term_sums
from gradsplit.compile_core.lowering.fusion.pieces import in_pieces
from gradsplit.compile_core.lowering.fusion.step_order import (
    Dependencies,
    direct_dependencies,
    topological_order,
)
from gradsplit.compile_core.lowering.nests.body_builder import BodyBuilder
from gradsplit.compile_core.lowering.nests.change_axes import OtherPointsError, Transplant, simplified
from gradsplit.compile_core.lowering.nests.live_statements import without_dead_statements
from gradsplit.compile_core.lowering.nests.match_axes import NoMatchError, axis_terms, match
from gradsplit.compile_core.lowering.tiling.tiling_cpp import shares_points

# Beyond these, registers and compile time cost more than memory traffic saves.
_MOST_STATEMENTS = 400
_MOST_BUFFERS = 28
# Nests without a flow between them are joined only this near: joining keeps both sets of buffers alive.
_HORIZONTAL_REACH = 24
# Nests that share nothing but their iteration space are joined only this near, to start one kernel less.
_SIBLING_REACH = 4
# Nests that do the same are not joined for sharing as little as this, a learning rate or the count of steps.
_BATCH_BYTES = 256
# What starting a kernel is worth, in bytes.
_LAUNCH_BYTES = 4096


def fuse(program: LoopProgram) -> LoopProgram:
    """Joins nests; the program computes the same values from the same inputs, and says which nests stayed apart."""
    refusals: list[Refusal] = []
    count = 0

    def fused(piece: LoopProgram) -> LoopProgram:
        nonlocal count
        piece, refused = _Fusion(piece).run(count)
        refusals.extend(refused)
        count += len(piece.steps)
        return piece

    program = in_pieces(program, fused)
    return replace(program, unfused=tuple(sorted(refusals, key=lambda refusal: -refusal.bytes)))


class _Fusion:
    """Steps by number; a joined nest takes the place of its two parts.

    Attributes:
        steps: what is left, by step number.
        order: which steps must run before which.
        position, last_position: where the first and the last part of a step were at the beginning.
        step_at: the step by its position.
    """

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.steps: dict[int, Step] = {}
        self.readers: dict[str, set[int]] = {}
        self.writers: dict[str, set[int]] = {}
        self.refused: dict[tuple[int, int], Refusal] = {}
        self.position: dict[int, int] = {}
        self.step_at: dict[int, int] = {}
        self.last_position: dict[int, int] = {}
        returned = {view.buffer for view in program.outputs if view is not None}
        self.kept = returned | set(program.inputs) | set(program.destinations)

    def buffer_dtype(self, name: str) -> torch.dtype:
        return self.program.buffers[name].dtype

    def run(self, first_name: int) -> tuple[LoopProgram, Iterable[Refusal]]:
        """The fused program, whose nests are numbered from ``first_name`` on, and what stayed apart."""
        self._build_dependencies()
        heap = [entry for number in self.steps for entry in self._candidates(number)]
        heapq.heapify(heap)
        while heap:
            worth, first, second = heapq.heappop(heap)
            if first not in self.steps or second not in self.steps:
                continue
            if -worth <= _LAUNCH_BYTES + _BATCH_BYTES and self._may_be_batched(first, second):
                continue
            if self._join(first, second):
                for entry in self._candidates(second):
                    heapq.heappush(heap, entry)
        order = topological_order(self.order.direct, self.position)
        # What was put into a tensor may have no reader but those that got their elements from another nest meanwhile.
        alive = _alive([self.steps[number] for number in order], self.kept)
        order = [order[place] for place in alive]
        steps = _renamed((self._simplified(self.steps[number]) for number in order), first_name)
        touched = set[str]().union(*(reads(step) | writes(step) for step in steps)) | self.kept
        buffers = {name: spec for name, spec in self.program.buffers.items() if name in touched}
        constants = {name: tensor for name, tensor in self.program.constants.items() if name in touched}
        named = zip(order, steps, strict=True)
        names = {number: step.name for number, step in named if isinstance(step, LoopNest)}
        refusals = [
            replace(refusal, first=names[pair[0]], second=names[pair[1]])
            for pair, refusal in self.refused.items()
            if pair[0] in names and pair[1] in names
        ]
        return replace(self.program, buffers=buffers, constants=constants, steps=tuple(steps)), refusals

    def _simplified(self, step: Step) -> Step:
        if not isinstance(step, LoopNest):
            return step
        return simplified(without_one_term_sums(step, self.buffer_dtype), self.buffer_dtype)

    # -- dependencies

    def _build_dependencies(self) -> None:
        steps = [
            self._simplified(self.program.steps[place]) for place in _alive(self.program.steps, self.kept)
        ]
        self.order = Dependencies(direct_dependencies(steps))
        for number, step in enumerate(steps):
            self.steps[number] = step
            self.position[number] = self.last_position[number] = number
            self.step_at[number] = number
            for name in reads(step):
                self.readers.setdefault(name, set()).add(number)
            for name in writes(step):
                self.writers.setdefault(name, set()).add(number)

    # -- candidates

    def _candidates(self, number: int) -> list[tuple[int, int, int]]:
        """Heap entries ``(-bytes, earlier step, later step)`` of the pairs that a step could be joined in."""
        step = self.steps[number]
        if not isinstance(step, LoopNest):
            return []
        saved: dict[int, int] = {}
        flows: set[int] = set()
        for name in reads(step) | writes(step):
            size = self._touched_bytes(step, name)
            readers, writers = self.readers.get(name, set()), self.writers.get(name, set())
            for other in (readers | writers) - {number}:
                if not isinstance(self.steps[other], LoopNest):
                    continue
                flow = (other in writers) != (number in writers)
                dies = flow and len(readers) == 1 and name not in self.kept
                both_write = other in writers and number in writers
                saved[other] = saved.get(other, 0) + (0 if both_write else size) * (2 if dies else 1)
                if flow:
                    flows.add(other)
        entries = []
        for place in range(
            self.position[number] - _SIBLING_REACH, self.position[number] + _SIBLING_REACH + 1
        ):
            other = self.step_at.get(place, number)
            sibling = self.steps[other]
            close = other != number and self._span(number, other) <= _SIBLING_REACH
            if not close or not isinstance(sibling, LoopNest) or not _alike(step, sibling):
                continue
            if self._device(step) == self._device(sibling):
                saved.setdefault(other, 0)
        for other, size in saved.items():
            first, second = self._in_order(number, other)
            near = self._span(number, other) <= _HORIZONTAL_REACH
            if other in flows or near:
                entries.append((-(size + _LAUNCH_BYTES), first, second))
        return entries

    def _touched_bytes(self, nest: LoopNest, name: str) -> int:
        """The bytes of a buffer, or of those of its elements of which the nest reads or writes one each."""
        spec = self.program.buffers[name]
        found = [access for access in accesses(nest) if access.buffer == name]
        if any(any(access.strides) or access.gathers for access in found):
            return spec.bytes
        return min(spec.bytes, len(found) * spec.dtype.itemsize)

    def _may_be_batched(self, one: int, other: int) -> bool:
        """Whether two nests do the same to different buffers, as to an optimizer's parameters: then ``batch_nests``
        makes one kernel of them and of all others that do, which a joined nest would stay out of."""
        first, second = self.steps[one], self.steps[other]
        assert isinstance(first, LoopNest) and isinstance(second, LoopNest)
        # Two sums over long columns hold too much to be batched.
        if self.order.must_follow(other, one) or first.reduced_axes or len(first.body) != len(second.body):
            return False
        if writes(first) & writes(second):
            return False  # parts of one tensor
        key = batch_key(first, self.program.buffers)
        return key is not None and key == batch_key(second, self.program.buffers)

    def _span(self, one: int, other: int) -> int:
        """How many steps apart the first and the last part of two nests were at the beginning."""
        last = max(self.last_position[one], self.last_position[other])
        return last - min(self.position[one], self.position[other])

    def _in_order(self, one: int, other: int) -> tuple[int, int]:
        if self.order.must_follow(one, other):
            return other, one
        if self.order.must_follow(other, one):
            return one, other
        return (one, other) if self.position[one] < self.position[other] else (other, one)

    # -- joining

    def _join(self, first: int, second: int) -> bool:
        """Joins two nests into the number of the second, or notes why not."""
        earlier, later = self.steps[first], self.steps[second]
        assert isinstance(earlier, LoopNest) and isinstance(later, LoopNest)
        try:
            if self.order.must_follow(first, second):
                raise NoMatchError("they depend on each other through other steps")
            for other in self.order.direct[second] - {first}:
                if self.order.must_follow(other, first):
                    raise NoMatchError(f"{_step_name(self.steps[other])} must run between them")
            joined = self._without_unread(self._joined_nest(earlier, later), {first, second})
            if not writes(joined):
                raise NoMatchError("nobody reads what they compute any more")
            if joined.reduced_axes and (_reads_windows(earlier) or _reads_windows(later)):
                raise NoMatchError("each walk over a row would read its windows anew")
            if not shares_points(joined) and self._device(joined).type == "cpu":
                raise NoMatchError("threads share it neither by its points nor by where it adds")
        except (NoMatchError, OtherPointsError) as reason:
            size = self._shared_bytes(earlier, later)
            self.refused[first, second] = Refusal(earlier.name, later.name, size, str(reason))
            return False
        self._replace(first, second, joined)
        return True

    def _joined_nest(self, earlier: LoopNest, later: LoopNest) -> LoopNest:
        touched = (reads(earlier) | writes(earlier)) & (reads(later) | writes(later))
        if touched & (combined_buffers(earlier) | combined_buffers(later)):
            raise NoMatchError("what a nest adds up in memory is whole when it has ended")
        if reads(earlier) & writes(later):
            raise NoMatchError("the later one overwrites what the earlier one reads")
        found = match(earlier, later, self.buffer_dtype)
        builder = BodyBuilder(found.extents, self.buffer_dtype)
        transplant = Transplant(builder)
        transplant.copy(found.first, axis_terms(found.first_axes))
        transplant.copy(found.second, axis_terms(found.second_axes))
        if not _alike(earlier, later) and not self._saves(earlier, later, builder):
            raise NoMatchError("they read the same buffers at different points")
        body = without_dead_statements(builder.statements)
        if len(body) > _MOST_STATEMENTS:
            raise NoMatchError("the joined body would be too long")
        if len({s.access.buffer for s in body if isinstance(s, (Load, Store))}) > _MOST_BUFFERS:
            raise NoMatchError("the joined nest would touch too many buffers")
        origins = tuple(dict.fromkeys([*earlier.origins, *later.origins]))
        joined = LoopNest(later.name, found.extents, found.reduced_axes, body, origins)
        if additions(joined) != additions(earlier) + additions(later):
            raise NoMatchError("what is added would be added more or less often")
        return joined

    def _saves(self, earlier: LoopNest, later: LoopNest, builder: BodyBuilder) -> bool:
        """Whether any load became unnecessary, or both fill one buffer."""
        if writes(earlier) & (writes(later) | reads(later)):
            return True
        loads = sum(isinstance(s, Load) for nest in (earlier, later) for s in nest.body)
        return sum(isinstance(s, Load) for s in builder.statements) < loads

    def _shared_bytes(self, earlier: LoopNest, later: LoopNest) -> int:
        shared = (reads(earlier) | writes(earlier)) & reads(later)
        return sum(self.program.buffers[name].bytes for name in shared)

    def _replace(self, first: int, second: int, joined: LoopNest) -> None:
        parts = self.steps[first], self.steps[second]
        for index, touched in ((self.readers, reads), (self.writers, writes)):
            for name in touched(parts[0]) | touched(parts[1]):
                index[name].difference_update((first, second))
        for name in reads(joined):
            self.readers.setdefault(name, set()).add(second)
        for name in writes(joined):
            self.writers.setdefault(name, set()).add(second)
        self.order.join((first, second), second)
        self.steps[second] = joined
        self.last_position[second] = max(self.last_position[first], self.last_position[second])
        del self.step_at[self.position[first]], self.step_at[self.position[second]]
        self.position[second] = min(self.position[first], self.position[second])
        self.step_at[self.position[second]] = second
        del self.steps[first]

    def _without_unread(self, joined: LoopNest, parts: set[int]) -> LoopNest:
        """A nest joined of two steps, without its stores that no other step reads."""
        needed = reads(joined) | self.kept
        return _without_stores(
            joined, {name for name in writes(joined) - needed if not self.readers.get(name, set()) - parts}
        )

    def _device(self, nest: LoopNest) -> torch.device:
        return self.program.buffers[next(iter(writes(nest)))].device


def _reads_windows(nest: LoopNest) -> bool:
    """Whether three elements in a line are read at each point, the neighbours' among them."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for statement in nest.body:
        if isinstance(statement, Load) and not statement.access.gathers:
            access = statement.access
            found.setdefault((access.buffer, access.strides), []).append(access.offset)
    return any(
        sum(offset - min(offsets) in range(step, step * extent, step) for offset in offsets) > 1
        for (_, strides), offsets in found.items()
        for step, extent in zip(strides, nest.extents, strict=True)
        if step > 0
    )


def _alive(steps: Sequence[Step], kept: set[str]) -> list[int]:
    """Where the steps are but for nests whose results nobody reads, as where the position of the largest of one is
    wanted."""
    needed, alive = set(kept), list[int]()
    for place, step in reversed(list(enumerate(steps))):
        if not isinstance(step, LoopNest) or writes(step) & needed:
            needed |= reads(step)
            alive.append(place)
    return alive[::-1]


def _without_stores(nest: LoopNest, dead: set[str]) -> LoopNest:
    """The nest without its stores to some buffers, and without what only these needed."""
    if not dead:
        return nest
    # a dead store becomes a constant, so that the other values keep their numbers
    body = [
        Constant(0, torch.int64) if isinstance(s, Store) and s.access.buffer in dead else s for s in nest.body
    ]
    return replace(nest, body=without_dead_statements(body))


def _alike(one: LoopNest, other: LoopNest) -> bool:
    """Whether two nests have the same iteration space, up to the order of axes."""
    if one.reduced_axes != other.reduced_axes:
        return False
    parallel = len(one.extents) - one.reduced_axes
    return (
        len(one.extents) == len(other.extents)
        and sorted(one.extents[:parallel]) == sorted(other.extents[:parallel])
        and sorted(one.extents[parallel:]) == sorted(other.extents[parallel:])
    )


def _step_name(step: Step) -> str:
    return str(step.target) if isinstance(step, ExternCall) else step.name


def _renamed(steps: Iterable[Step], first: int) -> list[Step]:
    """Names nests after the kinds of nodes that they compute, each with its position among the steps."""
    renamed: list[Step] = []
    for step in steps:
        if isinstance(step, LoopNest):
            kinds = dict.fromkeys(origin.rstrip("0123456789").rstrip("_") for origin in step.origins)
            step = replace(
                step, name=f"{'_'.join(['fused', *kinds])[:56].rstrip('_')}_{first + len(renamed)}"
            )
        renamed.append(step)
    return renamed
