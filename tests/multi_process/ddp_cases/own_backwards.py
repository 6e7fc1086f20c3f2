"""Gradients that a program asks for itself: in a module under DDP, and in steps that are compiled as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import gradsplit
from gradsplit.distributed import DDPOptions, compile_ddp
from tests.multi_process.ddp_harness import case, check_close, check_gradients, data, pair, stock_ddp


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = self.second(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()


@case()
def a_penalty_in_the_module() -> None:
    kept = compile_ddp(stock_ddp(Penalised), DDPOptions(overlap="reducer"), backend="aot_eager")
    for stock, compiled in (pair(Penalised, backend="aot_eager"), (stock_ddp(Penalised), kept)):
        for step in range(4):
            for model in (stock, compiled):
                model.zero_grad()
                model(data(step)).backward()
            check_gradients(stock, compiled)


def step_of(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@case()
def steps_compiled_as_a_whole() -> None:
    """The gradients are averaged as ever: the backward is no part of a graph."""
    for around in (stock_ddp, lambda: gradsplit.compile(stock_ddp(), backend="aot_eager")):
        plain, model = stock_ddp(), around()
        expected, found = step_of(plain), gradsplit.compile(step_of(model), backend="aot_eager")
        for step in range(4):
            check_close(found(data(step)), expected(data(step)))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            check_close(other, one)


@case()
def steps_past_the_wrapper() -> None:
    """What is called without DDP keeps the rank's own gradients, in plain PyTorch and in a graph."""
    plain, model = stock_ddp(Penalised), stock_ddp(Penalised)
    expected = step_of(plain.module)
    found = gradsplit.compile(step_of(model.module), backend="aot_eager", fullgraph=True)
    for step in range(4):
        check_close(found(data(step)), expected(data(step)))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        check_close(other, one)
