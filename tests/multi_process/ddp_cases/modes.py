"""Calls under modes of torch: no gradients, inference, function modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_buffers,
    check_close,
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
    train,
)


@case()
def evaluation_without_gradients() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    with torch.no_grad():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.eval(), stock.eval()
    with torch.inference_mode():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.train(), stock.train()
    train((stock, compiled), steps=1)


@case()
def first_call_under_a_mode() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    with torch.overrides.BaseTorchFunctionMode():
        train((stock, compiled), steps=1)
    train((stock, compiled), steps=1)
    check_in_graph(compiled)
    check_buffers(stock, compiled)


@case()
def first_call_in_inference_mode() -> None:
    """As of a loop that evaluates once before it trains."""
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    for model in (stock, compiled):
        model.eval()
    with torch.inference_mode():
        check_close(compiled(data(5)), stock(data(5)))
    for model in (stock, compiled):
        model.train()
    train((stock, compiled), steps=3)
    check_in_graph(compiled)
    check_buffers(stock, compiled)


@case()
def first_call_under_vmap() -> None:
    stock, compiled = pair(backend="aot_eager")
    for step in range(2):
        for model in (stock, compiled):
            model.zero_grad()
            loss_of(torch.func.vmap(model)(data(step))).backward()
        check_gradients(stock, compiled)
    train((stock, compiled), steps=2)
    check_in_graph(compiled)


@case()
def modes_in_later_calls() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled), steps=1)
    for mode in (torch.overrides.BaseTorchFunctionMode(), torch.device(DEVICE)):
        with mode:
            train((stock, compiled), steps=2)
        check_in_graph(compiled)
    check_buffers(stock, compiled)


class Refusing(Net):
    """Raises for inputs of some kind, in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.shape[0] == 3:
            raise ValueError("three rows are too few")
        return self.third(self.second(self.norm(x)))


@case()
def exceptions_of_the_program() -> None:
    """Raised on all ranks, in the first call and in a later one; the steps between and behind them are stock DDP's."""
    stock, compiled = pair(Refusing, backend="aot_eager")
    for _ in range(2):
        for model in (stock, compiled):
            with pytest.raises(ValueError, match="too few"):
                model(data(0, rows=3))
        check_steps(stock, compiled, steps=2)
    check_in_graph(compiled)


class Hooked(Net):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        gradsplit.graph_break()
        if x.requires_grad:
            x.register_hook(self.look)
        return self.third(self.norm(x))

    def look(self, gradient: torch.Tensor) -> None:
        if self.fails:
            raise ArithmeticError("a gradient that the program does not like")


@case()
def exceptions_in_the_backward() -> None:
    """A hook of an activation raises on all ranks; the next step begins afresh."""
    stock, compiled = pair(Hooked, backend="aot_eager")
    check_steps(stock, compiled)
    compiled.module.fails = True
    loss = loss_of(compiled(data(9)))
    try:
        loss.backward()
    except ArithmeticError:
        compiled.module.fails = False
    assert not compiled.module.fails
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def another_backward_behind_one_that_raised() -> None:
    """Some all-reduces were under way by then."""
    stock, compiled = pair(Hooked, backend="aot_eager")
    check_steps(stock, compiled)
    for model, raises in ((stock, False), (compiled, True)):
        loss = loss_of(model(data(9)))
        if raises:
            model.module.fails = True
            with pytest.raises(ArithmeticError, match="does not like"):
                loss.backward(retain_graph=True)
            model.module.fails = False
        loss.backward()
    check_gradients(stock, compiled)
    check_steps(stock, compiled)


@case()
def exceptions_leave_what_gradients_were() -> None:
    """Programs that leave out a batch go on to accumulate."""
    stock, compiled = pair(backend="aot_eager")
    for own in (False, True):
        for model in (stock, compiled):
            plain_step(model, 0)
            if own:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            with model.no_sync():
                plain_step(model, 1)
            loss = loss_of(model(data(2)))
            with torch.no_grad():
                model.module.third.weight.mul_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        check_gradients(stock, compiled, synchronised=False)
        for model in (stock, compiled):
            plain_step(model, 3)
        check_gradients(stock, compiled)
    check_in_graph(compiled)


@case()
def evaluation_on_one_rank_alone() -> None:
    """Before the first step and behind it: a call whose gradients are not reduced waits for nobody."""
    stock, compiled = pair(backend="aot_eager")
    for rows in (4, 2):
        if dist.get_rank() == 1:
            with torch.no_grad():
                check_close(compiled(data(0, rows)), stock(data(0, rows)), exact=True)
            for model in (stock, compiled):
                with model.no_sync():
                    loss_of(model(data(0, rows))).backward()
        check_steps(stock, compiled)
    check_in_graph(compiled)


class _Slow(torch.autograd.Function):
    """The stream is busy for a while before gradients come."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(50_000_000)
        return gradient


@case("cuda")
def forwards_on_another_stream() -> None:
    """The engine runs backwards there, too, and what awaits all-reduces runs on the caller's stream."""
    other = torch.cuda.Stream()

    def run(model: Any, step: int) -> None:
        x = data(step)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            loss = loss_of(_Slow.apply(model(x)))
        torch.cuda.current_stream().wait_stream(other)
        loss.backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, steps=1)
    check_steps(stock, compiled, run, steps=7)
    check_in_graph(compiled)
