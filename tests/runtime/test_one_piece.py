"""How much memory a forward and its backward need at once, and which recordings begin with it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.loops import LoopProgram, Step, View
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime import cuda_graphs, one_piece
from gradsplit.compile_core.runtime.executable import Executable, link
from gradsplit.compile_core.runtime.instructions import instructions_of
from gradsplit.compile_core.runtime.link_program import LinkedProgram
from gradsplit.compile_core.runtime.one_piece import InOnePiece, bytes_of_both
from tests.runtime.recorder_on_cpu import LendingRecorder
from tests.runtime.test_lent_memory import Step as TrainingStep
from tests.runtime.test_lent_memory import add_up, drop_before, run
from tests.runtime.test_link_program import doubling, extern, spec, whole

aten = torch.ops.aten
MIB = 1 << 20
# Elements of a buffer.
MUCH = 2 * MIB


def program(
    steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, int]
) -> Executable:
    """A schedule of one region; buffers have ``MUCH`` elements unless ``sizes`` say otherwise."""
    buffers = {name: spec(sizes.get(name, MUCH)) for name in (*inputs, *"abcdefgh", *outputs)}
    views: list[View | None] = [whole(name, sizes.get(name, MUCH)) for name in outputs]
    loops = LoopProgram("test", tuple(inputs), (), buffers, {}, tuple(steps), tuple(views))
    made = LinkedProgram("", (), lambda _: (), None, lambda: instructions_of(loops, True))
    compute = Compute("region", torch.fx.GraphModule({}, torch.fx.Graph()), tuple(inputs), tuple(outputs))
    return link(Schedule("test", tuple(inputs), (compute,), tuple(outputs)), {"region": made})


def copies(*pairs: str) -> list[Step]:
    return [doubling(f"nest_{pair}", pair[0], pair[1], MUCH) for pair in pairs]


def needed(forward: Executable, backward: Executable, kept: Mapping[int, int], num_visible: int = 0) -> float:
    return bytes_of_both(forward, backward, kept, num_visible) / MUCH / 4


def test_the_backward_lies_where_temporaries_and_what_was_kept_lay() -> None:
    forward = program(copies("xa", "ab", "bc"), "x", "c", {})
    assert needed(forward, program(copies("ca"), "c", "a", {}), {0: 0}) == 2
    # Beside what was kept, the temporaries of the backward.
    backward = program(copies("ca", "ab"), "c", "b", {})
    assert needed(forward, backward, {0: 0}) == 2
    assert needed(forward, program(copies("ca", "cb", "ad"), "c", "bd", {}), {0: 0}) == 3


def test_what_others_hold_is_not_used_again() -> None:
    forward = program(copies("xa", "xb"), "x", "ab", {})
    backward = program(copies("bc", "cd"), "b", "d", {})
    assert needed(forward, backward, {0: 1}, num_visible=1) == 3
    # The loss is what the backward reads: it stays.
    assert needed(program(copies("xa"), "x", "a", {}), program(copies("ac"), "a", "c", {}), {0: 0}, 1) == 2


def test_gaps_that_are_too_small() -> None:
    sizes = {"c": MUCH // 2, "d": MUCH // 2}
    forward = program([doubling("n", "x", "c", MUCH // 2), *copies("xa", "xb")], "x", "bca", sizes)
    # What is free after the first step is half of what the second one makes.
    steps = [extern(aten.neg.default, (whole("c", MUCH // 2),), "d"), *copies("ae")]
    backward = program(steps, "ca", "de", sizes)
    assert needed(forward, backward, {0: 1, 1: 2}, num_visible=1) == 4


def test_what_is_small_does_not_count() -> None:
    sizes = {"a": MIB // 4}
    forward = program([doubling("n", "x", "a", MIB // 4)], "x", "a", sizes)
    backward = program([doubling("n", "a", "b", MIB // 4)], "a", "b", {"b": MIB // 4, **sizes})
    assert needed(forward, backward, {0: 0}) == 0


def test_views_and_several_results() -> None:
    steps = [
        extern(aten.sin.default, (whole("x", MUCH),), "a"),
        extern(aten.t.default, (whole("a", MUCH),), "b"),
    ]
    forward = program(steps, "x", "b", {})
    assert needed(forward, program(copies("ba"), "b", "a", {}), {0: 0}) == 2


def test_programs_that_do_not_say() -> None:
    forward = program(copies("xa"), "x", "a", {})
    silent = link(forward.schedule, {"region": lambda arguments: arguments})
    assert needed(silent, forward, {0: 0}) == needed(forward, silent, {0: 0}) == 0


class Memory:
    """Attributes: ``entered``, how often it was."""

    entered = 0

    def enter(self) -> None:
        self.entered += 1

    def leave(self) -> None: ...


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
    forward, room, memory = Sharing(), [5], Memory()
    both = InOnePiece(forward, lambda: room[0])
    assert both([1]) == [1] and not log
    assert both.sharing(memory)([2]) == [2]
    assert log == [(5, "cuda")] and not forward.memories
    room[0] = 0
    assert both.sharing(memory)([3]) == [3]
    assert len(log) == 1 and forward.memories == [memory]


class AskingRecorder(LendingRecorder):
    """Attributes: ``asked``, for each recording of a forward whether it began with memory for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def record(self, program: Program, inputs: list[Any], within: Any = None) -> Any:
        if isinstance(program, InOnePiece):
            self.asked.append(program.sharing(Memory()) is not None)
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


@pytest.mark.parametrize(("step", "asked"), [(drop_before, [True]), (two_at_once, [True, False, False])])
def test_a_forward_makes_room_if_its_backward_may_be_recorded_there(
    step: TrainingStep, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = AskingRecorder()
    monkeypatch.setattr(cuda_graphs, "bytes_of_both", lambda *_: 5)
    monkeypatch.setattr(one_piece, "sharing", lambda program, memory: None)
    made = functools.partial(cuda_graphs.graph_programs, recorder=recorder)
    monkeypatch.setattr(pipeline, "with_cuda_graphs", made)
    run(step)
    assert recorder.asked == asked
