"""``static_graph=True``: the first backward tells of all others, and parameters may stay unused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import gradsplit
from tests.multi_process.ddp_cases.checkpointing import Block
from tests.multi_process.ddp_harness import (
    Net,
    PartlyPlain,
    case,
    check_gradients,
    check_in_graph,
    check_reducer,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
    stock_ddp,
    train,
)


class Partial(Net):
    """The last layer and the norm are not used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@case()
def static_graphs_go_the_in_graph_way() -> None:
    for make in (Net, PartlyPlain):
        stock, compiled = pair(make, backend="aot_eager", static_graph=True)
        check_steps(stock, compiled)
        check_in_graph(compiled)
    stock, compiled = pair(static_graph=True)
    train((stock, compiled), steps=6)
    check_in_graph(compiled)


@case()
def parameters_that_no_rank_uses() -> None:
    """Their gradients stay what they are: none, or the program's own."""
    for find_unused in (False, True):
        stock, compiled = pair(
            Partial, backend="aot_eager", static_graph=True, find_unused_parameters=find_unused
        )
        check_steps(stock, compiled)
        assert compiled.module.third.weight.grad is None
        for model in (stock, compiled):
            model.zero_grad()
            weight = model.module.third.weight
            weight.grad = torch.full_like(weight, 1.0 + dist.get_rank())
            plain_step(model, 5)
        check_gradients(stock, compiled, exact=True, synchronised=False)
        check_in_graph(compiled)


class UsedByRankZero(Net):
    """Of the plain part, rank 0 uses the second layer."""

    @gradsplit.disable
    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if dist.get_rank() == 0 else x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.plain(torch.tanh(self.norm(self.first(x))))))


@case()
def parameters_that_one_rank_uses() -> None:
    """The others get the mean, too, also on top of what they have."""
    stock, compiled = pair(UsedByRankZero, backend="aot_eager", static_graph=True)
    check_steps(stock, compiled)
    for step in range(2):
        for model in (stock, compiled):
            plain_step(model, 5 + step)
        check_gradients(stock, compiled, exact=True)
    assert compiled.module.second.weight.grad.any()
    check_in_graph(compiled)


class Reused(nn.Module):
    """One block in several reentrant checkpoints, each of which is a graph or more of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = Block(), Block(), Block()

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        gradsplit.graph_break()
        return self.block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return checkpoint(self.last, x, use_reentrant=True)


@case()
def reentrant_checkpoints_of_the_same_parameters() -> None:
    """Stock DDP refuses them in graphs that are not static, where it cannot know which use is the last."""

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step).requires_grad_())).backward()

    def accumulate(model: Any, step: int) -> None:
        with model.no_sync():
            run(model, step + 20)
        run(model, step)

    for bucket_cap_mb in (0.001, 25):
        stock, compiled = pair(Reused, backend="aot_eager", static_graph=True, bucket_cap_mb=bucket_cap_mb)
        check_steps(stock, compiled, run)
        # What was there before is added last here.
        check_steps(stock, compiled, accumulate, steps=2, exact=False)
        check_in_graph(compiled)


@case()
def several_forwards_of_a_static_graph() -> None:
    def run(model: Any, step: int) -> None:
        model(data(step + 50))
        (loss_of(model(data(step))) + loss_of(model(data(step + 30)))).backward()

    stock, compiled = pair(backend="aot_eager", static_graph=True)
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def static_graphs_that_change() -> None:
    """Errors where stock DDP has them: in the backward that has a gradient too many, in the forward behind one that
    lacks one."""

    class Switched(Net):
        uses_third = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(torch.tanh(self.norm(self.first(x))))
            return self.third(x) if self.uses_third else x

    class SwitchedBetweenGraphs(Switched):
        @gradsplit.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    for at_first, make in itertools.product((True, False), (Switched, SwitchedBetweenGraphs)):
        for model in pair(make, backend="aot_eager", static_graph=True):
            model.module.uses_third = at_first
            plain_step(model, 0)
            model.module.uses_third = not at_first
            result = model(data(1))
            with pytest.raises(RuntimeError, match=r"(?s)graph.*changed"):
                loss_of(result).backward()
                assert at_first
                model(data(2))


@case()
def graphs_declared_static_later() -> None:
    """Before the first step, as stock DDP wants it."""
    for model in pair(Partial, backend="aot_eager"):
        model._set_static_graph()
        for step in range(2):
            plain_step(model, step)
        assert model.module.third.weight.grad is None
    compiled = gradsplit.compile(stock_ddp(), backend="aot_eager")
    plain_step(compiled, 0)
    compiled._set_static_graph()
    with pytest.raises(RuntimeError, match="before the first"):
        plain_step(compiled, 1)


@case()
def reducers_made_again_for_a_static_graph() -> None:
    """A new one learns the graph, whatever its module has learnt with the one before."""
    stock, ddp = stock_ddp(static_graph=True), stock_ddp(static_graph=True)
    for model in (stock, ddp):
        plain_step(model, 0)
    compiled = gradsplit.compile(ddp, backend="aot_eager")
    check_steps(stock, compiled, steps=1)
    check_in_graph(compiled)
    for model in (stock, compiled):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    check_steps(stock, compiled)
    check_reducer(compiled, "communication hook")
