"""Which allocations of a program lie in memory that recordings share: none that a result lives in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.backends import generated_kernels
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.loops import LoopProgram, Step, View
from gradsplit.compile_core.ir.temporary_memory import SharingProgram, sharing
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Instruction,
    Instructions,
    Switch,
    instructions_of,
)
from gradsplit.compile_core.runtime.link_program import LinkedProgram, link_program
from gradsplit.compile_core.runtime.share_temporaries import share_temporaries
from tests.runtime.recorder_on_cpu import RecorderOnCpu
from tests.runtime.test_link_program import doubling, extern, spec, whole

aten = torch.ops.aten
SHARED, OWN = Switch(True), Switch(False)


def switches(
    steps: list[Step], outputs: list[View | None], *names: str, apart: Collection[str] = ()
) -> list[Any]:
    """Buffers as they are allocated, nests and calls as they run, and where memory changes."""
    buffers = {name: spec(3) for name in ("x", *names)}
    program = LoopProgram("test", ("x",), (), buffers, {}, tuple(steps), tuple(outputs))
    shared = share_temporaries(instructions_of(program, kernels_take_addresses=False), apart)
    return [shown for step in shared.steps if (shown := _shown(step)) is not None]


def _shown(step: Instruction) -> Any:
    if isinstance(step, Allocate):
        return step.buffer
    return step if isinstance(step, Switch) else None


def test_temporaries_are_shared_and_results_are_not() -> None:
    steps: list[Step] = [
        doubling("one", "x", "y", 3),
        doubling("two", "y", "z", 3),
        doubling("three", "z", "result", 3),
    ]
    found = switches(steps, [whole("result", 3)], "y", "z", "result")
    assert found == [SHARED, "y", "z", OWN, "result"]


def test_a_program_that_ends_with_a_temporary_leaves_shared_memory() -> None:
    steps: list[Step] = [doubling("one", "x", "result", 3), doubling("two", "x", "y", 3)]
    assert switches(steps, [whole("result", 3)], "y", "result") == ["result", SHARED, "y", OWN]


def test_a_program_without_temporaries_never_enters_it() -> None:
    assert switches([doubling("one", "x", "result", 3)], [whole("result", 3)], "result") == ["result"]


def test_calls_of_torchs_kernels() -> None:
    # Before a call that makes a result, all that it allocates is its own; before one that makes a temporary, shared.
    steps: list[Step] = [
        extern(aten.sin.default, (whole("x", 3),), "y"),
        extern(aten.topk.default, (whole("y", 3), 3), "result", "z"),
        extern(aten.cos.default, (whole("z", 3),), "last"),
    ]
    found = switches(steps, [whole("result", 3)], "y", "z", "result", "last")
    assert found == [SHARED, OWN, SHARED, OWN]


def test_temporaries_that_lie_apart() -> None:
    steps: list[Step] = [
        doubling("one", "x", "y", 3),
        doubling("two", "y", "z", 3),
        extern(aten.reshape.default, (whole("z", 3), [3]), "view"),
        extern(aten.topk.default, (whole("view", 3), 3), "v", "w"),
        doubling("three", "w", "result", 3),
    ]
    names = ("y", "z", "view", "v", "w", "result")
    found = switches(steps, [whole("result", 3)], *names, apart=["y", "v"])
    assert found == ["y", SHARED, "z", OWN, "result"]
    # What it is a view of lies there, too.
    found = switches(steps, [whole("result", 3)], *names, apart=["view"])
    assert found == [SHARED, "y", OWN, "z", SHARED, OWN, "result"]


def test_what_lies_in_own_memory_takes_no_shared_memory() -> None:
    """Of the backward of a loss: the logits' gradient takes the memory of what was saved, or of a temporary."""
    steps = [
        Allocate("t", ("x", "y")),
        *(
            Allocate("a", ("t", "x", "s", "b", "result")),
            Allocate("s", ("a",)),
            Allocate("result", ("s", "a")),
        ),
    ]
    program = LoopProgram("test", ("x",), (), {}, {}, (), (whole("result", 3),))
    instructions = Instructions(program, ("x",), tuple(steps), {}, {}, frozenset())
    found = share_temporaries(instructions, ["a", "b"]).steps
    assert [step for step in found if isinstance(step, Allocate)] == [
        Allocate("t", ("x", "y")),
        *(Allocate("a", ("x", "b", "result")), Allocate("s", ("a",)), Allocate("result", ("a",))),
    ]


def test_what_a_result_may_be_a_view_of_is_a_result() -> None:
    steps: list[Step] = [
        doubling("one", "x", "y", 3),
        extern(aten.reshape.default, (whole("y", 3), [3]), "view"),
    ]
    assert switches(steps, [whole("view", 3)], "y", "view") == ["y"]


library = torch.library.Library("gradsplit_sharing", "FRAGMENT")
library.define("kept(Tensor x) -> Tensor")


def test_operators_that_are_not_torchs_own_may_keep_what_they_allocate() -> None:
    steps: list[Step] = [
        extern(torch.ops.gradsplit_sharing.kept.default, (whole("x", 3),), "y"),
        extern(aten.add.Tensor, (whole("y", 3), 1), "result"),
    ]
    assert switches(steps, [whole("result", 3)], "y", "result") == []


class NotedMemory(TorchDispatchMode):
    """Notes whose storage was made while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered = False
        self.entered = 0
        self.shared: set[int] = set()

    def enter(self) -> None:
        assert not self.is_entered
        self.is_entered = True
        self.entered += 1

    def leave(self) -> None:
        assert self.is_entered
        self.is_entered = False

    def make_room(self, size: int) -> None: ...

    def apart(self, program: str) -> Collection[str]:
        return ()

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self.shared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {
            value.untyped_storage()._cdata
            for value in pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }
        for value in pytree.tree_leaves(results):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given:
                # Storages are freed, and others are made where they were.
                note = self.shared.add if self.is_entered else self.shared.discard
                note(value.untyped_storage()._cdata)
        return results


def run_sharing(program: Program, arguments: list[Any]) -> tuple[Sequence[Any], int]:
    """The results, none of which lies in shared memory, and how often that was entered."""
    assert isinstance(program, SharingProgram)
    memory = NotedMemory()
    shared = sharing(program, memory)
    with memory:
        results = shared(arguments)
    assert not memory.is_entered
    assert not any(map(memory.holds, results))
    return results, memory.entered


class SharingRecorder(RecorderOnCpu):
    """Has programs share their temporaries, and looks where the results are.

    Attributes:
        entered: how often shared memory was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entered = 0

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        def noted(arguments: list[Any]) -> Sequence[Any]:
            results, entered = run_sharing(program, arguments)
            self.entered += entered
            return results

        return super().record(noted, inputs, within)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharingRecorder]:
    made = SharingRecorder()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=made))
    yield made


class Net(nn.Module):
    """Statistics that the forward stores, calls of torch's kernels that make results, views, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.norm(self.convolution(x)))
        sorted_values, order = self.first(hidden.mean((2, 3))).sort(-1)
        scores = self.second(torch.tanh(sorted_values))
        return scores.square().mean(), scores.t()[2:], order[:, :1]


def test_training_with_shared_temporaries(recorder: SharingRecorder, region_form: str) -> None:
    """In Python a dispatch mode sees all allocations; of the interpreter's those of the calls that it makes there."""
    torch.manual_seed(0)
    plain, twin = Net(), Net()
    twin.load_state_dict(plain.state_dict())
    compiled = gradsplit.compile(twin, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(4, 3, 8, 8)
        for module, call in ((plain, plain), (twin, compiled)):
            module.zero_grad()
            loss, scores, _ = call(x)
            (loss + scores.sum()).backward()
        for expected, found in zip(plain.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
        for expected, found in zip(plain.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(found, expected)
    assert recorder.recorded == 2 and recorder.entered > 2


def test_a_default_program_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[LinkedProgram] = []

    def noting(*arguments: Any) -> LinkedProgram:
        linked.append(link_program(*arguments))
        return linked[-1]

    monkeypatch.setattr(generated_kernels, "link_program", noting)
    gradsplit.compile(lambda x: (x.sin() @ x).cos(), fullgraph=True)(torch.ones(4, 4))
    assert [made.link_again for made in linked] == [None]
    assert linked[0].sharing(NotedMemory()) is linked[0]
