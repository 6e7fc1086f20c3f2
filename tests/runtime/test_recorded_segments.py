"""Backwards that store gradients for a communicator, recorded segment by segment on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from gradsplit.compile_core.runtime.executable import Executable, link
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram
from gradsplit.compile_core.runtime.recorded_segments import GraphedBackward, SegmentRecorder, StoringProgram
from tests.runtime.recorder_on_cpu import RecorderOnCpu
from tests.runtime.silent_communicator import SilentCommunicator


class FakeCommunicator(SilentCommunicator):
    """Places of one process; a bucket's all-reduce is that its values at the arrival are written down.

    Attributes:
        adds: the backward that runs next comes on top of another.
        begun: how many backwards were.
    """

    def __init__(self, **sizes: int) -> None:
        self.stored = {name: torch.full((size,), torch.nan) for name, size in sizes.items()}
        self.reduced: list[tuple[str, list[float]]] = []
        self.adds = False
        self.begun = 0
        self._scratch: dict[str, torch.Tensor] = {}

    def begin(self, node: Any, undefined: Mapping[str, Collection[int]]) -> FakeCommunicator:
        self.begun += 1
        return self

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        return None if self.adds else [self.stored[name] for name in names]

    def destinations(self, names: Sequence[str]) -> list[torch.Tensor]:
        if self.adds:
            return [self._scratch.setdefault(name, torch.empty_like(self.stored[name])) for name in names]
        return [self.stored[name] for name in names]

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        for name in names:
            if self.adds:
                self.stored[name] += self._scratch.pop(name)
            self.reduced.append((name, self.stored[name].tolist()))


class Observer:
    def __init__(self) -> None:
        self.events: list[str] = []

    def region_started(self, name: str) -> None:
        self.events.append(f"{name} started")

    def region_finished(self, name: str) -> None:
        self.events.append(f"{name} finished")


def scaled(factor: float, *, passes_on: bool) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A region: stores a multiple of its input, and passes the next one to the next region."""

    def region(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        x, place = arguments
        arguments.clear()
        passed = [x + 1] if passes_on else []
        return [torch.mul(x, factor, out=place), *passed]

    return region


def backward() -> Executable:
    """Gradients of ``a``, then of ``b`` from what the first region passes on; a last region computes a result."""
    empty = torch.fx.GraphModule({}, torch.fx.Graph())
    schedule = Schedule(
        "backward",
        ("x",),
        (
            Compute("first", empty, ("x",), ("a.stored", "passed"), {"a.stored": "a"}),
            Compute("second", empty, ("passed",), ("b.stored", "again"), {"b.stored": "b"}),
            Compute("rest", empty, ("again",), ("result",)),
        ),
        (None, "result"),
    )
    regions = {
        "first": scaled(2.0, passes_on=True),
        "second": scaled(3.0, passes_on=True),
        "rest": lambda arguments: [arguments[0] * 10],
    }
    return link(schedule, regions)


def graphed(
    executable: Executable, communicator: FakeCommunicator, recorder: RecorderOnCpu
) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
    storing = StoringProgram(executable)
    program = GraphedProgram(
        "a backward", storing, SegmentRecorder(recorder), 2, changed=[1, 2], copied_in=[0]
    )
    run = GraphedBackward(storing, program)
    return lambda inputs: run(inputs, communicator.begin(None, {}))


def call(program: Any, *values: float) -> list[Any]:
    nothing, result = program([torch.tensor(values)])
    assert nothing is None
    return result.tolist()


@pytest.fixture
def recorder() -> RecorderOnCpu:
    return RecorderOnCpu()


def test_what_is_stored_is_told_after_each_region(recorder: RecorderOnCpu) -> None:
    communicator = FakeCommunicator(a=2, b=2)
    run = graphed(backward(), communicator, recorder)
    for step in range(5):
        communicator.reduced.clear()
        assert call(run, step, step + 1) == [10.0 * step + 20, 10.0 * step + 30]
        assert communicator.reduced == [
            ("a", [2.0 * step, 2.0 * step + 2]),
            ("b", [3.0 * step + 3, 3.0 * step + 6]),
        ]
        assert communicator.begun == step + 1
    # The first call ran plainly; of the others each replays three regions.
    assert (recorder.recorded, recorder.replayed) == (3, 12)


def test_a_backward_on_top_of_another_runs_plainly(recorder: RecorderOnCpu) -> None:
    communicator = FakeCommunicator(a=1, b=1)
    run = graphed(backward(), communicator, recorder)
    for _ in range(2):
        call(run, 1.0)
    replayed = recorder.replayed
    communicator.adds = True
    assert call(run, 2.0) == [40.0]
    assert communicator.stored["a"].item() == 2 + 4
    assert communicator.stored["b"].item() == 6 + 9
    assert communicator.begun == 3
    communicator.adds = False
    assert recorder.replayed == replayed
    assert call(run, 3.0) == [50.0]
    assert communicator.stored["a"].item() == 6
    assert recorder.recorded == 3 and recorder.replayed > replayed


def test_places_that_moved_are_recorded_anew(recorder: RecorderOnCpu) -> None:
    communicator = FakeCommunicator(a=1, b=1)
    run = graphed(backward(), communicator, recorder)
    before = communicator.stored["a"]
    for step in range(6):
        if step == 3:
            communicator.stored["a"] = torch.full((1,), torch.nan)
        call(run, float(step))
        assert communicator.stored["a"].item() == 2.0 * step
    assert before.item() == 4.0, "a place of before was written to"
    assert recorder.recorded == 6


def test_observers_are_told_of_replays(recorder: RecorderOnCpu) -> None:
    executable, observer = backward(), Observer()
    run = graphed(executable, FakeCommunicator(a=1, b=1), recorder)
    for _ in range(3):
        call(run, 1.0)
    executable.observer = observer
    call(run, 1.0)
    assert observer.events == [
        f"{name} {what}" for name in ("first", "second", "rest") for what in ("started", "finished")
    ]


def test_a_failed_recording_runs_plainly(recorder: RecorderOnCpu, caplog: Any) -> None:
    communicator = FakeCommunicator(a=1, b=1)
    run = graphed(backward(), communicator, recorder)
    recorder.failure = RuntimeError("no memory")
    for step in range(3):
        assert call(run, float(step)) == [10.0 * step + 20]
    assert communicator.reduced == [
        pair for step in range(3) for pair in (("a", [2.0 * step]), ("b", [3.0 * step + 3]))
    ]
    assert caplog.text.count("no memory") == 1


def test_programs_without_destinations_are_recorded_whole(
    recorder: RecorderOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=recorder))
    x = torch.randn(4, requires_grad=True)
    compiled = gradsplit.compile(lambda x: x.sin().sum(), backend="aot_eager", mode="reduce-overhead")
    for _ in range(3):
        compiled(x).backward()
    assert recorder.recorded == 2
