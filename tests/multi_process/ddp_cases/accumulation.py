"""Gradients of several backwards, with and without ``no_sync()``, and several forwards before a backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


@case()
def no_sync_accumulates_locally() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model(data(0)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)


@case()
def first_call_under_no_sync() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)
    check_in_graph(compiled)


@case()
def gradients_accumulate_without_zero_grad() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case()
def zero_grad_keeping_tensors() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model.zero_grad(set_to_none=False)
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case()
def two_forwards_before_two_backwards() -> None:
    _, compiled = pair()
    reference = Net().to(DEVICE)
    reference.load_state_dict(compiled.module.state_dict())
    losses = [compiled(data(step)).square().mean() for step in range(2)]
    for loss in losses:
        loss.backward()
    for step in range(2):
        reference(data(step)).square().mean().backward()
    for expected, found in zip(reference.parameters(), compiled.parameters(), strict=True):
        mean = expected.grad / dist.get_world_size()
        dist.all_reduce(mean)
        check_close(found.grad, mean)


@case()
def no_sync_over_several_batches() -> None:
    def run(model: Any, step: int) -> None:
        with model.no_sync():
            for part in range(2):
                loss_of(model(data(3 * step + part))).backward()
        loss_of(model(data(3 * step + 2))).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def forward_under_no_sync_and_backward_outside_of_it() -> None:
    """Stock DDP goes by the forward, so nothing is reduced; ranks hold gradients of their own."""
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled)
    for model in (stock, compiled):
        model.zero_grad()
        with model.no_sync():
            loss = loss_of(model(data(7)))
        loss.backward()
    check_gradients(stock, compiled, exact=True, synchronised=False)
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def backward_under_no_sync_and_forward_outside_of_it() -> None:
    def run(model: Any, step: int) -> None:
        loss = loss_of(model(data(step)))
        with model.no_sync():
            loss.backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def sum_of_the_losses_of_several_forwards() -> None:
    def run(model: Any, step: int) -> None:
        sum(loss_of(model(data(3 * step + part))) for part in range(3)).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def a_forward_whose_result_is_the_next_ones_input() -> None:
    def run(model: Any, step: int) -> None:
        x = data(step)
        for _ in range(3):
            x = model(x)[:, :16]
        loss_of(x).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def two_backwards_through_one_forward() -> None:
    """Both are reduced. Stock DDP reduces the first only, and leaves ranks with different sums."""
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled)
    for model in (stock, compiled):
        model.zero_grad()
        loss = loss_of(model(data(7)))
        loss.backward(retain_graph=model is compiled)
        if model is compiled:
            loss.backward()
    for parameter in stock.parameters():
        parameter.grad.mul_(2)
    check_gradients(stock, compiled)
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def a_forward_without_a_backward_between_steps() -> None:
    def run(model: Any, step: int) -> None:
        model(data(step + 50))
        loss_of(model(data(step))).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


class Towers(nn.Module):
    """Two results, with no parameter in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.left(x)
        gradsplit.graph_break()
        return left, self.right(x)


@case()
def backwards_that_share_the_parameters_among_them() -> None:
    def run(model: Any, step: int) -> None:
        left, right = model(data(step))
        loss_of(left).backward()
        loss_of(right).backward()

    for hooked in (False, True):
        stock, compiled = pair(Towers, backend="aot_eager")
        if hooked:
            for model in (stock, compiled):
                for parameter in model.parameters():
                    parameter.register_hook(lambda gradient: gradient * 2)
        check_steps(stock, compiled, run)
        check_in_graph(compiled)


@case()
def programs_of_two_modes_in_one_backward() -> None:
    """Two graphs of the same parameters, and each of them twice."""

    class Sure(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if self.training else x * 0.5)

    def run(model: Any, step: int) -> None:
        losses = []
        for part in range(4):
            model.train(part % 2 == 0)
            losses.append(loss_of(model(data(4 * step + part))))
        sum(losses).backward()

    stock, compiled = pair(Sure, backend="aot_eager")
    check_steps(stock, compiled, run, exact=False)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 2


@case()
def accumulation_over_a_change_of_plan() -> None:
    """The buckets are planned anew after some backwards; what gradients hold by then moves with them."""
    stock, compiled = pair(backend="aot_eager")
    for step in range(9):
        for model in (stock, compiled):
            loss_of(model(data(step))).backward()
        check_gradients(stock, compiled)
    check_in_graph(compiled)


@case()
def anomalies_are_looked_for() -> None:
    stock, compiled = pair(backend="aot_eager")
    with torch.autograd.detect_anomaly(check_nan=True):
        check_steps(stock, compiled)
    check_in_graph(compiled)


class Rooted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(super().forward(x).square() * x[0, 0])


@case()
def anomalies_are_found() -> None:
    for model in pair(Rooted, backend="aot_eager"):
        for first, is_found in ((1.0, False), (0.0, True), (1.0, False)):
            x = data(0)
            x[0, 0] = first
            with torch.autograd.detect_anomaly(check_nan=True):
                loss = model(x).mean()
                with pytest.raises(RuntimeError, match="nan values") if is_found else nullcontext():
                    loss.backward()


@case()
def ranks_accumulate_over_different_numbers_of_batches() -> None:
    def run(model: Any, step: int) -> None:
        with model.no_sync():
            for part in range(1 + dist.get_rank()):
                loss_of(model(data(5 * step + part))).backward()
        loss_of(model(data(5 * step + 4))).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)
