"""Where the first run of a program that is to be recorded takes place, so that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import gradsplit
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.runtime import cuda_graphs, one_piece
from gradsplit.compile_core.runtime.cuda_graphs import CudaRecorder, runs_on_any_stream
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram
from tests.runtime.recorder_on_cpu import RecorderOnCpu
from tests.runtime.test_shared_memory import MIB, Wide, held_mib, no_private_memory

__all__ = ["no_private_memory"]


class Stream:
    """Attributes: ``number``, 0 for that of the caller; ``log`` of what all were told."""

    log: list[str]
    made = 0
    device = 0

    def __init__(self, index: int, number: int | None = None) -> None:
        if number is None:
            Stream.made += 1
        self.number = Stream.made if number is None else number

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.number} waits for {other.number}")


class Memory:
    is_recorded_in = False

    def have_workspace(self) -> None:
        Stream.log.append("workspace")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    made = Memory()
    Stream.log, Stream.made = [], 0

    @contextlib.contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        Stream.log.append(f"on {entered.number}")
        yield
        Stream.log.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(0, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cuda_graphs, "shared_memory", lambda index: made)
    monkeypatch.setattr(
        cuda_graphs, "_note_use", lambda values, stream: Stream.log.append(f"{values} of {stream.number}")
    )
    cuda_graphs._idle_streams.cache_clear()
    yield made
    cuda_graphs._idle_streams.cache_clear()


def recorder(**settings: bool) -> CudaRecorder:
    return CudaRecorder(torch.device("cuda", 0), **{"calls_cublas": True, "runs_anywhere": True, **settings})


def program(inputs: list[Any]) -> Sequence[Any]:
    Stream.log.append("runs")
    return [10 * inputs.pop()]


def test_a_first_run_is_where_recordings_are_made(memory: Memory) -> None:
    for _ in range(2):
        assert recorder().rehearse(program, [7]) == [70]
        begun = ["[7] of 1", "on 1", "1 waits for 0", "workspace"]
        assert Stream.log == [*begun, "runs", "0 waits for 1", "back", "[70] of 0"]
        Stream.log.clear()
    with pytest.raises(IndexError):
        recorder().rehearse(program, [])
    assert Stream.log[-1] == "0 waits for 1"
    Stream.log.clear()
    nested = recorder().rehearse(lambda inputs: recorder().rehearse(program, inputs), [7])
    assert nested == [70] and [line for line in Stream.log if "on " in line] == ["on 1", "on 2"]


@pytest.mark.parametrize("settings", [{"calls_cublas": False}, {"runs_anywhere": False}, {}])
def test_first_runs_on_the_stream_of_the_caller(memory: Memory, settings: dict[str, bool]) -> None:
    """Without need, where a program might not follow, and where replays may run meanwhile."""
    memory.is_recorded_in = not settings
    assert recorder(**settings).rehearse(program, [7]) == [70]
    assert Stream.log == ["runs"] and Stream.made <= 1


def test_only_the_first_run_is_rehearsed() -> None:
    class Rehearsing(RecorderOnCpu):
        rehearsed = 0

        def rehearse(self, program: Any, inputs: list[Any]) -> Sequence[Any]:
            self.rehearsed += 1
            return super().rehearse(program, inputs)

    made = Rehearsing()
    graphed = GraphedProgram("doubling", lambda inputs: [2 * inputs[0]], made, 1)
    made.against = "another is being recorded"
    counts = []
    for number in range(4):
        (found,) = graphed([torch.full((2,), float(number))])
        assert found.tolist() == [2 * number] * 2
        counts.append((made.rehearsed, made.recorded))
        made.against = ""
    assert counts == [(0, 0), (1, 0), (1, 1), (1, 2)]


library = torch.library.Library("gradsplit_streams", "FRAGMENT")
library.define("own(Tensor x) -> Tensor")


def test_operators_of_others_may_launch_on_one_stream_always() -> None:
    traced = make_fx(lambda x: torch.max(x @ x, 0)[0])(torch.ones(2, 2))
    assert runs_on_any_stream(traced)
    for target in (torch.ops.gradsplit_streams.own.default, KeptCall("own", lambda x: [x], ()), len):
        graph = torch.fx.Graph()
        given = graph.placeholder("x")
        graph.output(graph.call_function(operator.getitem, (graph.call_function(target, (given,)), 0)))
        assert not runs_on_any_stream(torch.fx.GraphModule({}, graph))


def train(module: nn.Module, call: Any, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    found = []
    for _ in range(steps):
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(x).float().square().mean()
        loss.backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("no_private_memory")
def test_a_first_step_leaves_nothing_behind() -> None:
    """Else cuBLAS's workspaces hold the pieces in which they lie."""
    torch.manual_seed(0)
    module = Wide(8192).cuda()
    x = torch.randn(4096, 64, device="cuda")
    expected = train(module, module, x, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for steps in (1, 3):
            found = train(module, gradsplit.compile(module, mode="reduce-overhead"), x, steps)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-5)
            del found
        module.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == stream.cuda_stream and segment["segment_pool_id"] == (0, 0)
    ]
    assert sum(segment["total_size"] for segment in segments) <= 8 * MIB


@pytest.mark.gpu
@pytest.mark.usefixtures("no_private_memory")
def test_what_convolutions_take_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings hold no more than where nobody knew."""
    torch.manual_seed(0)
    widths = (3, 48, 64, 96, 64)
    module = nn.Sequential(
        *(
            part
            for given, made in itertools.pairwise(widths)
            for part in (nn.Conv3d(given, made, 3, padding=1, bias=False), nn.BatchNorm3d(made), nn.ReLU())
        )
    ).cuda()
    x = torch.randn(2, 3, 8, 48, 48, device="cuda")
    expected = train(module, module, x, 1)
    held = []
    for metered in (False, True):
        if not metered:
            monkeypatch.setattr(one_piece, "may_be_metered", lambda: False)
        else:
            monkeypatch.undo()
        gradsplit.reset()
        before = held_mib()
        call = gradsplit.compile(module, mode="reduce-overhead")
        found = train(module, call, x, 4)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=1e-2)
        del found
        module.zero_grad()
        held.append(held_mib() - before)
        del call
    assert held[1] <= held[0], held
