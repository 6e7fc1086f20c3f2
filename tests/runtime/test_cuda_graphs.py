"""CUDA graphs on a GPU: the same numbers as without, random ones included, and a way back from every failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.runtime.cuda_graphs import CudaRecorder
from tests.autograd.compare_with_eager import check_drawing_call

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    """Convolution, batch norm, dropout, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = nn.functional.dropout(torch.relu(self.norm(self.convolution(x))), 0.3, self.training)
        scores = self.out(hidden.mean((2, 3)))
        return scores.square().mean(), hidden


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each recording that was made."""
    made: list[str] = []
    record = CudaRecorder.record

    def counting(self: CudaRecorder, *args: Any) -> Any:
        result = record(self, *args)
        made.append("recorded")
        return result

    monkeypatch.setattr(CudaRecorder, "record", counting)
    yield made


def step(module: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    loss, hidden = call(x)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return [
        loss.detach().clone(),
        hidden.detach().clone(),
        *gradients,
        *(b.clone() for b in module.buffers()),
    ]


def run_steps(mode: str, backend: str, accumulate: bool) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    torch.manual_seed(5)
    module = Net().cuda()
    compiled = gradsplit.compile(module, mode=mode, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for number in range(8):
        if number % 3 == 0 or not accumulate:
            optimizer.zero_grad()
        found.append(step(module, compiled, torch.randn(8, 3, 16, 16, device="cuda")))
        optimizer.step()
    return found, torch.rand(4, device="cuda")


@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["zeroed", "accumulated"])
def test_training_equals_the_default_mode(backend: str, accumulate: bool, recorded: list[str]) -> None:
    torch.backends.cudnn.deterministic = True
    try:
        expected, after = run_steps("default", backend, accumulate)
        assert not recorded
        found, after_found = run_steps("reduce-overhead", backend, accumulate)
    finally:
        torch.backends.cudnn.deterministic = False
    assert len(recorded) >= 2
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(after, after_found), "random numbers after the graphs go on as without them"


def test_memory_stays_the_same_over_steps(recorded: list[str]) -> None:
    module = Net().cuda()
    compiled = gradsplit.compile(module, mode="reduce-overhead")
    used = []
    for _ in range(12):
        module.zero_grad()
        step(module, compiled, torch.randn(8, 3, 16, 16, device="cuda"))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[-4], used
    assert len(recorded) <= 6


def test_results_are_kept_and_streams_are_followed() -> None:
    module = Net().cuda().eval()
    compiled = gradsplit.compile(module, mode="reduce-overhead")
    xs = [torch.randn(4, 3, 16, 16, device="cuda") for _ in range(8)]
    found = []
    with torch.no_grad():
        expected = [module(x)[1] for x in xs]
        for number, x in enumerate(xs):
            stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(compiled(x)[1])
            torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_failed_capture_is_survived(caplog: Any, recorded: list[str]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.linalg.inv(x), 0.5)

    compiled = gradsplit.compile(program, mode="reduce-overhead", backend="aot_eager")
    x = torch.eye(8, device="cuda") * 2
    for _ in range(4):
        torch.manual_seed(1)
        found = compiled(x)
        torch.manual_seed(1)
        assert torch.equal(found, program(x))
    assert recorded or "recording failed" in caplog.text


def test_what_the_cpu_does_runs_before_a_replay(recorded: list[str]) -> None:
    def program(x: torch.Tensor, scale: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chance = torch.rand([])
        y = x * chance * scale + (positions + 1).to(x.device)
        return y.sin(), chance < 0.5, positions * 2

    compiled = gradsplit.compile(program, mode="reduce-overhead")
    x = torch.ones(4, device="cuda", requires_grad=True)
    for step in range(6):
        scale, positions = torch.tensor(3.0 + step), torch.arange(4) + step
        check_drawing_call(compiled, program, step, x, scale, positions)
    assert recorded


def test_constant_numbers_are_in_the_recording(recorded: list[str]) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1] * 2
        y[:, 0] = 7  # a tensor on the CPU
        return y

    compiled = gradsplit.compile(shifted, mode="reduce-overhead")
    for step in range(4):
        x = torch.randn(3, 5, device="cuda") + step
        assert torch.equal(compiled(x), shifted(x))
    assert recorded


def test_tensors_on_the_cpu_are_the_reason(caplog: Any, recorded: list[str]) -> None:
    def program(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * (weights * 2).to(x.device)

    compiled = gradsplit.compile(program, mode="reduce-overhead")
    x, weights = torch.ones(4, device="cuda"), torch.ones(4, requires_grad=True)
    for _ in range(3):
        found = compiled(x, weights)
    assert torch.equal(found, torch.full((4,), 2.0, device="cuda"))
    assert not recorded and "it has tensors on: cpu, cuda" in caplog.text


def test_inside_a_capture_of_the_programs_own(caplog: Any) -> None:
    module = Net().cuda().eval()
    compiled = gradsplit.compile(copy.deepcopy(module), mode="reduce-overhead")
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)[1]
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, module(x)[1], rtol=1e-4, atol=1e-5)
    assert "another CUDA graph is being captured" in caplog.text
