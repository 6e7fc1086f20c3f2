"""Which temporaries lie beside what a forward and its backward keep, and which recordings begin with room for both."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.runtime import cuda_graphs, one_piece
from gradsplit.compile_core.runtime.memory_lives import Memory
from gradsplit.compile_core.runtime.one_piece import InOnePiece, Pieces, pieces_for
from tests.runtime.recorder_on_cpu import LendingRecorder
from tests.runtime.test_lent_memory import Step as TrainingStep
from tests.runtime.test_lent_memory import add_up, drop_before, run

MIB = 1 << 20


def memories(*lines: tuple[str, float, int, float, bool]) -> list[Memory]:
    """Of each: the buffer, MiB, the first and the last moment, whether it outlasts."""
    return [
        Memory(int(mib * MIB), begins, ends, {("program", name)}, outlasts)
        for name, mib, begins, ends, outlasts in lines
    ]


def found(*lines: tuple[str, float, int, float, bool]) -> tuple[int, int, str]:
    """MiB of the pieces, and what lies in the first one."""
    pieces = pieces_for(memories(*lines))
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


def test_what_a_call_makes_lies_in_one_place() -> None:
    lines = [("k", 40, 0, 9, True), ("l", 20, 0, 1, True), ("t", 20, 2, 3, False), ("u", 20, 2, 3, False)]
    assert found(*lines) == (60, 40, "kl")
    assert found(*lines[:3], ("u", 20, 3, 3, False)) == (60, 20, "klt")


def test_what_is_small_does_not_count() -> None:
    assert found(("k", 1, 0, math.inf, True), ("t", 0.5, 1, 2, False)) == (0, 0, "")
    assert found(("k", 12, 0, math.inf, True), ("t", 0.5, 1, 2, False)) == (12, 0, "k")


def test_where_the_piece_ends_the_gap_is_small() -> None:
    """Torch's allocator takes the smallest gap: what begins at the end of the piece is not in the larger ones."""
    lines = [("a", 30, 0, 3, True), ("b", 30, 1, 9, True), ("c", 30, 2, 3, True), ("d", 29, 4, 9, True)]
    own, shared, names = found(*lines, ("e", 30, 5, 9, True))
    assert (own, shared, names) == (90, 0, "abcde")


class Shared:
    """Attributes: ``log`` of what was done."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def enter(self) -> None:
        self.log.append("enter")

    def leave(self) -> None:
        self.log.append("leave")

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


def test_room_is_made_and_left_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(one_piece.torch, "empty", lambda size, dtype, device: log.append((size, device)))
    forward, backward, memory = Sharing(), Sharing(), Shared(log)
    pieces = [Pieces(5, 7, {"program": {"t"}})]
    first, second = (
        InOnePiece(program, lambda: pieces[0], is_first=program is forward) for program in (forward, backward)
    )
    assert first([1]) == [1] and not log
    assert first.sharing(memory)([2]) == [2]
    assert log == [(5, "cuda"), "enter", (7, "cuda"), "leave"]
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
