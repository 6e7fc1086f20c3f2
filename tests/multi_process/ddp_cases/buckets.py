"""The buckets themselves: gradients written into them by compiled backwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from gradsplit.distributed import inspect_ddp
from gradsplit.distributed.reducer.parked_reducer import is_parked, park_reducer
from tests.multi_process.ddp_harness import (
    Net,
    PartlyPlain,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_same_on_all_ranks,
    data,
    loss_of,
    pair,
    train,
)


@case()
def gradients_equal_stock_ddp() -> None:
    stock, compiled = pair()
    train((stock, compiled))
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).plan.buckets) > 1
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def plan_is_chosen_from_measured_costs() -> None:
    stock, compiled = pair()
    runner = inspect_ddp(compiled)
    for step in range(8):
        for model in (stock, compiled):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)
        assert (runner.merge_plan is not None) == (step >= 5)
    assert runner.plan is runner.merge_plan.plan
    names = [name for name, _ in compiled.module.named_parameters()]
    assert sorted(parameter.name for parameter in runner.plan.parameters) == sorted(names)
    last_layer, first_layer = runner.costs.ready_s["third.weight"], runner.costs.ready_s["first.weight"]
    assert 0 < last_layer <= first_layer <= runner.costs.end_s
    plans = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (str(runner.plan), runner.costs.end_s, runner.costs.link))
    assert plans[0] == plans[1]
    assert len(runner.graphs) == 1


@case()
def rounds_that_pass_before_any_is_measured() -> None:
    """Several backwards of one forward are rounds, and are over when the next forward begins to measure; another
    forward may follow without a round between them."""
    stock, compiled = pair()
    loss = loss_of(compiled(data(0)))
    for _ in range(6):
        loss.backward(retain_graph=True)
    compiled.zero_grad()
    for step in range(4):
        for model in (stock, compiled):
            model.zero_grad()
            (loss_of(model(data(step))) + loss_of(model(data(step + 9)))).backward()
        check_gradients(stock, compiled)
    assert inspect_ddp(compiled).merge_plan is not None


@case()
def reducer_is_made_again_when_it_is_asked_for() -> None:
    """Its buckets are a copy of all gradients, which nobody needs in the in-graph way."""
    stock, compiled = pair()
    train((stock, compiled), steps=2)
    ddp = inspect_ddp(compiled).ddp
    assert is_parked(ddp) and not is_parked(stock)
    assert compiled._get_ddp_logging_data()["world_size"] == dist.get_world_size()
    assert not is_parked(ddp)
    park_reducer(ddp)
    copied = copy.deepcopy(ddp)
    assert is_parked(ddp) and not is_parked(copied) and vars(copied).keys() >= {"reducer", "logger"}
    loss_of(copied(data(0))).backward()
    check_same_on_all_ranks(copied.module.first.weight.grad, "gradient of a copy")
    # A module that was never parked does not meet what notices it.
    assert "reducer" in vars(stock) and not hasattr(type(type(stock).__dict__["reducer"]), "__set__")
    train((stock, compiled), steps=2)
    check_in_graph(compiled)
    for model in (stock, compiled):
        with model.join():
            model.zero_grad()
            model(data(7)).square().mean().backward()
    check_gradients(stock, compiled)


@case()
def gradients_move_to_the_chosen_buckets() -> None:
    """What was accumulated under the first plan is not lost."""
    stock, compiled = pair()
    for step in range(7):
        for model in (stock, compiled):
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)
    assert inspect_ddp(compiled).merge_plan is not None


@case()
def gradients_are_views_of_buckets() -> None:
    _, compiled = pair()
    compiled(data(0)).sum().backward()
    buckets = inspect_ddp(compiled).buckets
    places = [buckets.buffers.places[name] for name, _ in compiled.module.named_parameters()]
    assert all(place is p.grad for place, p in zip(places, compiled.parameters(), strict=True))
    storages = {p.grad.untyped_storage().data_ptr() for p in compiled.parameters()}
    assert len(storages) == len(inspect_ddp(compiled).plan.buckets)


class Blocks(nn.Module):
    """Equal blocks, between which the program does what no graph can hold; a parameter of its own in between, too."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(16))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen.append(float(x.detach().sum()))
            breaks()
            x = x * self.scale
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        breaks()
        return x + self.linear(hidden)


@gradsplit.disable
def breaks() -> None:
    """A call that no graph holds."""


@case()
def several_graphs_share_the_buckets() -> None:
    """One compiled form of a block serves all blocks, and a block's weight is used in two graphs."""
    stock, compiled = pair(Blocks, bucket_cap_mb=0.001)
    train((stock, compiled), steps=3)
    check_in_graph(compiled)
    runner = inspect_ddp(compiled)
    assert len(runner.graphs) > 3 and len(runner.plan.buckets) > 1
    assert compiled.module.seen == pytest.approx(stock.module.seen, abs=1e-4)


@case()
def plain_code_between_graphs() -> None:
    stock, compiled = pair(PartlyPlain)
    train((stock, compiled), steps=3)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 2


@case()
def gradients_of_inputs_alone() -> None:
    """Asking for these leaves the parameters' gradients as they are, and starts no all-reduce."""
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    found = []
    for model in (stock, compiled):
        x = data(3).requires_grad_()
        found.append(torch.autograd.grad(model(x).square().mean(), x)[0])
    check_close(found[1], found[0])
    check_gradients(stock, compiled)
    train((stock, compiled), steps=1)


@case()
def tied_weights_are_reduced_once() -> None:
    stock, compiled = pair(lambda: Net(tied=True))
    train((stock, compiled))
    check_in_graph(compiled)


@case()
def gradient_of_the_input() -> None:
    stock, compiled = pair()
    inputs = [data(0).requires_grad_() for _ in range(2)]
    for model, x in zip((stock, compiled), inputs, strict=True):
        model(x).square().mean().backward()
    check_gradients(stock, compiled)
    check_close(inputs[1].grad, inputs[0].grad)


@case()
def buckets_travel_while_the_program_reduces() -> None:
    """The program's own collectives in the backward are of the same communicator."""

    class Reducing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    class Blocks(Net):
        @gradsplit.disable
        def reduced(self, x: torch.Tensor) -> torch.Tensor:
            return Reducing.apply(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.reduced(torch.tanh(self.second(self.reduced(self.norm(self.first(x)))))))

    for stock, compiled in [pair(Blocks) for _ in range(2)]:
        train((stock, compiled), steps=8)
