"""Which temporaries lie beside what a forward and its backward keep, and which recordings begin with room for both."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.runtime import cuda_graphs, one_piece, shared_memory
from gradsplit.compile_core.runtime.memory_lives import Memory
from gradsplit.compile_core.runtime.one_piece import InOnePiece, Pieces, may_be_split, pieces_for
from tests.runtime.recorder_on_cpu import LendingRecorder
from tests.runtime.test_lent_memory import STEPS, add_up, drop_before, run
from tests.runtime.test_lent_memory import Step as TrainingStep
from tests.runtime.test_share_temporaries import run_sharing

MIB = 1 << 20
# So many forwards with backwards that all share what they can.
MANY = 1 << 20


def memories(*lines: tuple[str, float, int, float, bool]) -> list[Memory]:
    """Of each: the buffer, MiB, the first and the last moment, whether it outlasts."""
    return [
        Memory(int(mib * MIB), begins, ends, {("program", name)}, outlasts)
        for name, mib, begins, ends, outlasts in lines
    ]


def found(*lines: tuple[str, float, int, float, bool]) -> tuple[int, int, str]:
    """MiB of the pieces, and what lies in the first one."""
    pieces = pieces_for(memories(*lines), MANY)
    names = pieces.apart.get("program", ())
    return pieces.own_bytes // MIB, pieces.shared_bytes // MIB, "".join(sorted(names))


def test_temporaries_lie_where_the_forward_has_kept_nothing_yet_and_the_backward_needs_nothing_any_more() -> (
    None
):
    assert found(
        *(("a", 40, 0, 1, False), ("k", 60, 2, 8, True), ("l", 40, 3, 6, True)),
        *(("b", 30, 4, 5, False), ("c", 30, 5, 5, False), ("d", 40, 7, 9, False), ("e", 60, 9, 9, False)),
    ) == (100, 60, "adekl")


def test_what_is_kept_has_room_wherever_temporaries_lie() -> None:
    # It would fit as it begins, but then what is kept later does not.
    assert found(("k", 20, 0, 9, True), ("t", 20, 1, 3, False), ("l", 40, 2, 9, True)) == (60, 20, "kl")
    # In two gaps together, in none alone.
    lines = [(name, 20, k, 9, True) for k, name in enumerate("klmn")]
    lines[1], lines[3] = ("l", 20, 1, 4, True), ("n", 20, 3, 4, True)
    assert found(*lines, ("t", 40, 5, 6, False)) == (80, 40, "klmn")


def test_a_little_more_for_what_else_would_be_shared() -> None:
    assert found(("k", 640, 0, 9, True), ("t", 8, 1, 2, False)) == (648, 0, "kt")
    assert found(("k", 64, 0, 9, True), ("t", 8, 1, 2, False)) == (64, 20, "k")


def test_what_is_not_tried_any_more_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [("k", 60, 2, 9, True), ("t", 40, 0, 1, False), ("u", 20, 0, 1, False), ("v", 80, 3, 4, False)]
    assert found(*lines) == (60, 80, "ktu")
    for most, expected in ((0, (60, 80, "k")), (6, (60, 80, "k")), (7, (60, 80, "ktu"))):
        monkeypatch.setattr(one_piece, "_MOST_PLACED", most)
        assert found(*lines) == expected


def test_what_a_call_makes_lies_in_one_place() -> None:
    lines = [("k", 40, 0, 9, True), ("l", 20, 0, 1, True), ("t", 20, 2, 3, False), ("u", 20, 2, 3, False)]
    assert found(*lines) == (60, 40, "kl")
    assert found(*lines[:3], ("u", 20, 3, 3, False)) == (60, 20, "klt")


@pytest.mark.parametrize(
    ("pairs", "expected"), [(1, (100, 0, "klt")), (2, (100, 0, "klt")), (3, (80, 60, "kl"))]
)
def test_nothing_is_shared_where_all_pairs_need_less_so(pairs: int, expected: tuple[int, int, str]) -> None:
    """When the largest temporary is there, half of what is kept is not."""
    lines = memories(("k", 40, 0, 9, True), ("t", 60, 1, 1, False), ("l", 40, 2, 9, True))
    pieces = pieces_for(lines, pairs)
    names = "".join(sorted(pieces.apart["program"]))
    assert (pieces.own_bytes // MIB, pieces.shared_bytes // MIB, names) == expected
    # As large as both, or nearly so, it may as well be shared.
    for begins, mib in ((0, 0), (2, 4)):
        both = memories(("k", 40, 0, 9, True), ("t", 60, 1, 1, False), ("l", mib, begins, 9, True))
        assert pieces_for(both, 1).shared_bytes == 60 * MIB
    # So it must be if nothing that has a name lies there.
    lines[1].buffers.clear()
    assert pieces_for(lines, 1).shared_bytes == 60 * MIB


def test_what_is_small_does_not_count() -> None:
    assert found(("k", 1, 0, math.inf, True), ("t", 0.5, 1, 2, False)) == (0, 0, "")
    assert found(("k", 12, 0, math.inf, True), ("t", 0.5, 1, 2, False)) == (12, 0, "k")


def test_where_the_piece_ends_the_gap_is_small() -> None:
    """Torch's allocator takes the smallest gap: what begins at the end of the piece is not in the larger ones."""
    lines = [("a", 30, 0, 3, True), ("b", 30, 1, 9, True), ("c", 30, 2, 3, True), ("d", 29, 4, 9, True)]
    own, shared, names = found(*lines, ("e", 30, 5, 9, True))
    assert (own, shared, names) == (90, 0, "abcde")


def fits(memories: Sequence[Memory], size: int) -> bool:
    """Whether torch's allocator needs no more than a piece of that size, by its rules for blocks of one segment."""
    blocks: list[tuple[int, int, Memory | None]] = [(0, size, None)]  # offset, bytes, what is there
    for moment in range(200):
        for number, (offset, length, memory) in enumerate(blocks):
            if memory is not None and memory.ends < moment:
                blocks[number] = (offset, length, None)
        joined: list[tuple[int, int, Memory | None]] = []
        for offset, length, memory in blocks:
            if joined and memory is None and joined[-1][2] is None:
                joined[-1] = (joined[-1][0], joined[-1][1] + length, None)
            else:
                joined.append((offset, length, memory))
        blocks = joined
        for memory in memories:
            if memory.begins == moment:
                needed = -(-memory.bytes // 512) * 512
                free = [block for block in blocks if block[2] is None and block[1] >= needed]
                if not free:
                    return False
                best = min(free, key=lambda block: (block[1], block[0]))
                offset, length, _ = best
                is_split = length - needed > MIB
                parts = [(offset, needed if is_split else length, memory)]
                parts += [(offset + needed, length - needed, None)] if is_split else []
                number = blocks.index(best)
                blocks[number : number + 1] = parts
    return True


@pytest.mark.parametrize("seed", range(30))
def test_what_is_told_to_fit_fits(seed: int) -> None:
    """Torch's allocator puts random allocations into the pieces."""
    generator = random.Random(seed)
    made = []
    for begins in range(100):
        outlasts = generator.random() < 0.5
        ends = max(begins, 199 - begins - generator.randint(0, 9)) if outlasts else begins
        size = generator.choice([1.5, 4, 6.25, 16, 31])
        made.append((f"b{begins}", size, begins, ends + generator.randint(0, 3), outlasts))
    for begins in range(100, 190):
        outlasts = generator.random() < 0.2
        ends = math.inf if outlasts else begins + generator.randint(0, 4)
        made.append((f"b{begins}", generator.choice([1.5, 3.75, 17, 47]), begins, ends, outlasts))
    everything = memories(*made)
    pieces = pieces_for(everything, MANY)
    names = pieces.apart["program"]
    beside = [memory for memory in everything if any(name in names for _, name in memory.buffers)]
    others = [memory for memory in everything if memory not in beside]
    assert all(memory in beside for memory in everything if memory.outlasts) and len(beside) > 60
    assert fits(beside, pieces.own_bytes) and fits(others, pieces.shared_bytes)


@pytest.mark.parametrize(("limit", "may_be"), [(None, True), (-1, True), (8, True), (7, False), (6, False)])
def test_an_allocator_that_must_not_split_large_pieces(
    limit: int | None, may_be: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = {} if limit is None else {"max_split_size": limit}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    assert may_be_split(Pieces(5, 7, {})) == may_be == may_be_split(Pieces(7, 5, {}))


class Shared:
    """Attributes: ``log`` of what was done."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def enter(self) -> None:
        self.log.append("enter")

    def leave(self) -> None:
        self.log.append("leave")

    def make_room(self, size: int) -> None:
        self.log.append(("room", size))

    def apart(self, program: str) -> Sequence[str]:
        return ()


class Sharing:
    def __init__(self) -> None:
        self.memories: list[Any] = []

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return inputs

    def sharing(self, memory: Any) -> Program:
        self.memories.append(memory)
        return self


def test_where_no_piece_is_so_large_the_program_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(one_piece, "piece_of", fail)
    monkeypatch.setattr(shared_memory, "piece_of", fail)
    program = InOnePiece(Sharing(), lambda: Pieces(5, 7, {}), is_first=True)
    assert program.sharing(Shared([]))([2]) == [2]
    memory = object.__new__(shared_memory.SharedMemory)
    memory._room_bytes, left = 0, []
    monkeypatch.setattr(memory, "enter", lambda: None, raising=False)
    monkeypatch.setattr(memory, "leave", lambda: left.append(True), raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        memory.make_room(7)
    assert left == [True]


def test_room_is_made_and_left_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(one_piece, "piece_of", log.append)
    forward, backward, memory = Sharing(), Sharing(), Shared(log)
    pieces = [Pieces(5, 7, {"program": {"t"}})]
    first, second = (
        InOnePiece(program, lambda: pieces[0], is_first=program is forward) for program in (forward, backward)
    )
    assert first([1]) == [1] and not log
    assert first.sharing(memory)([2]) == [2]
    assert log == [5, ("room", 7)]
    log.clear()
    assert second.sharing(memory)([2]) == [2] and not log
    for program in (forward, backward):
        (given,) = program.memories
        assert (given.apart("program"), given.apart("other")) == ({"t"}, ())
        given.enter()
        given.leave()
    assert log == ["enter", "leave"] * 2


def test_without_pieces_all_temporaries_are_shared() -> None:
    forward, memory = Sharing(), Shared([])
    InOnePiece(forward, lambda: None, is_first=True).sharing(memory)([3])
    assert forward.memories == [memory] and not memory.log


class AskingRecorder(LendingRecorder):
    """Attributes: ``asked``, for each recording whether it is one of a forward, within another, with pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, bool, bool]] = []

    def record(self, program: Program, inputs: list[Any], within: Any = None) -> Any:
        if isinstance(program, InOnePiece):
            self.asked.append((program._is_first, within is not None, program._pieces() is not None))
        return super().record(program, inputs, within)


def two_at_once(
    module: nn.Module, call: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int
) -> None:
    """Gradients are added up, so that a backward has memory of its own; then a forward is recorded again."""
    if number < 5:
        add_up(module, call, optimizer, x, number)
    else:
        optimizer.zero_grad()
        losses = [call(x)[0], call(x)[0]]
        sum(losses).backward()


@pytest.mark.parametrize(("step", "further"), [(drop_before, 0), (two_at_once, 4)])
def test_there_are_pieces_if_a_backward_may_be_recorded_in_them(
    step: TrainingStep, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = AskingRecorder()
    monkeypatch.setattr(cuda_graphs, "memory_of_both", lambda *_: [])
    made = functools.partial(cuda_graphs.graph_programs, recorder=recorder)
    monkeypatch.setattr(pipeline, "with_cuda_graphs", made)
    run(step)
    assert recorder.asked[:2] == [(True, False, True), (False, True, True)]
    further_ones = recorder.asked[2:]
    assert len(further_ones) == further and not any(within or pieces for _, within, pieces in further_ones)


class SharingLendingRecorder(LendingRecorder):
    """Spoils what is overwritten, and looks where results are."""

    def _recorded(self, program: Program, inputs: list[torch.Tensor]) -> Any:
        return super()._recorded(lambda arguments: run_sharing(program, arguments)[0], inputs)


@pytest.mark.parametrize("step", STEPS)
def test_training_with_temporaries_here_and_there(
    step: TrainingStep, region_form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces for small allocations, too. A dispatch mode sees where those lie that are made in Python."""
    made: list[Pieces] = []

    def noted(memories: Sequence[Memory], pairs: int) -> Pieces:
        assert pairs >= 1
        made.append(pieces_for(memories, MANY))
        return made[-1]

    monkeypatch.setattr(one_piece, "_LARGEST_SMALL_BYTES", 0)
    monkeypatch.setattr(one_piece, "_rounded", lambda size: size)
    monkeypatch.setattr(one_piece, "piece_of", lambda size: None)
    monkeypatch.setattr(cuda_graphs, "pieces_for", noted)
    recorder = SharingLendingRecorder()
    programs = functools.partial(cuda_graphs.graph_programs, recorder=recorder)
    monkeypatch.setattr(pipeline, "with_cuda_graphs", programs)
    run(step, 12, backend="triton")
    assert recorder.within == STEPS[step]
    (pieces,) = made
    assert pieces.own_bytes and pieces.shared_bytes and pieces.apart
