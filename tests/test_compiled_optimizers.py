"""Optimizer steps without a special mode: one program each, whatever the learning rate and the step count are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import gradsplit
from gradsplit.compile_core.observe.stage_times import Stopwatch

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "adam": lambda p: optim.Adam(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, foreach=False, momentum=0.9, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.1, foreach=False),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, foreach=False),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, foreach=False),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.01, foreach=False),
}
STEPS = 4


def train(
    make: Callable[[Any], optim.Optimizer], backend: str | None, device: str = "cpu"
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double().to(device)
    optimizer = make(model.parameters())
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step() -> None:
        optimizer.step()

    call = step if backend is None else gradsplit.compile(step, backend=backend, fullgraph=True)
    for index in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((3, 4), index / 3, dtype=torch.float64, device=device)).square().mean().backward()
        call()
        schedule.step()
    return [
        *model.parameters(),
        *(value for state in optimizer.state.values() for value in state.values() if value is not None),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_step(name, "aot_eager", "cpu", caplog)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_step_with_generated_kernels(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_step(name, "triton", "cpu", caplog)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_on_a_gpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step counts stay on the CPU."""
    check_step(name, "triton", "cuda", caplog)


def check_step(name: str, backend: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(OPTIMIZERS[name], None, device)
    watch = Stopwatch()
    found = train(OPTIMIZERS[name], backend, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # The first step makes the state; the second finds it, and a learning rate that differs.
    assert len(watch.seconds()["trace_joint"]) == 2
    assert "torch's own kernels" not in caplog.text
