"""Buffers that a forward only brings up to date are broadcast while it runs; all others before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.graph_forms import GraphForms
from tests.multi_process.ddp_cases.cuda_graphs import recording
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_buffers,
    check_gradients,
    check_in_graph,
    check_same_on_all_ranks,
    data,
    loss_of,
    pair,
)


def with_statistics() -> Net:
    return Net(norm=nn.BatchNorm1d(32))


@contextmanager
def noticing() -> Iterator[list[bool]]:
    """Of each call of a graph that is compiled already, whether it began before the broadcast was done."""
    answers: list[bool] = []
    asked = GraphForms.awaits_buffers

    def ask(self: GraphForms, inputs: Any) -> bool:
        answers.append(asked(self, inputs))
        return answers[-1]

    with mock.patch.object(GraphForms, "awaits_buffers", ask):
        yield answers


def check_steps_between_changes(
    stock: Any, compiled: Any, run: Callable[[Any, int], torch.Tensor], steps: int = 4
) -> list[bool]:
    """Between steps each rank changes its buffers, so that it matters whose they are."""
    with noticing() as answers:
        for step in range(steps):
            for model in (stock, compiled):
                model.zero_grad()
                for buffer in model.module.buffers():
                    buffer.data.add_((step + dist.get_rank()) / 8 if buffer.is_floating_point() else step)
                loss_of(run(model, step)).backward()
            check_gradients(stock, compiled)
            check_buffers(stock, compiled)
    check_in_graph(compiled)
    return answers


@case()
def running_statistics() -> None:
    stock, compiled = pair(with_statistics, fullgraph=True)
    answers = check_steps_between_changes(stock, compiled, lambda model, step: model(data(step)))
    assert answers == [True] * 3, answers


@case()
def running_statistics_among_batches_of_two_sizes_and_evaluations() -> None:
    def run(model: Any, step: int) -> torch.Tensor:
        if step == 3:
            model.eval()
            with torch.no_grad():
                model(data(step))
            model.train()
        return model(data(step, rows=6 - 2 * (step % 2)))

    stock, compiled = pair(with_statistics)
    answers = check_steps_between_changes(stock, compiled, run, steps=5)
    assert answers[-1], answers


@case()
def running_statistics_of_recorded_forwards() -> None:
    with recording() as recorder:
        stock, compiled = pair(with_statistics, mode="reduce-overhead", fullgraph=True)
        answers = check_steps_between_changes(stock, compiled, lambda model, step: model(data(step)), steps=6)
        assert answers == [True] * 5 and recorder.segmented > 0, answers


@case()
def buffers_that_the_forward_reads() -> None:
    stock, compiled = pair(with_statistics)
    for model in (stock, compiled):
        model.module.norm.eval()  # the statistics are its own then
    answers = check_steps_between_changes(stock, compiled, lambda model, step: model(data(step)))
    assert answers == [False] * 3, answers


class Sharing(Net):
    """It reads a buffer's memory through tensors that are no buffers: an attribute's, and an argument's."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(32))
        self.register_buffer("table", torch.full((64,), 0.1))
        self.rows: Any = None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale + self.rows


@case()
def memory_of_buffers_under_another_name() -> None:
    def run(model: Any, step: int) -> torch.Tensor:
        table = model.module.table
        apart = torch.full_like(table, (step + 1) / 8)
        # First none of them is the buffer's, then one after the other.
        model.module.rows = (table if step == 2 else apart)[32:]
        return model(data(step), (table if step == 3 else apart)[:32])

    stock, compiled = pair(Sharing)
    answers = check_steps_between_changes(stock, compiled, run, steps=5)
    assert answers == [True, False, False, True], answers


class Guarded(Net):
    """A part of the graph raises, behind the norm."""

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.first.bias[place]


@case("cpu")
def a_forward_that_raises() -> None:
    """Buffers are those that were sent; a GPU does not raise."""
    stock, compiled = pair(lambda: Guarded(nn.BatchNorm1d(32)))

    def run(model: Any, step: int) -> torch.Tensor:
        if step == 2 and model is compiled:
            with pytest.raises(IndexError):
                model(data(step), torch.tensor([99]))
            for buffer in model.module.buffers():
                check_same_on_all_ranks(buffer, "buffer")
        return model(data(step), torch.tensor([3]))

    answers = check_steps_between_changes(stock, compiled, run)
    assert answers == [True] * 4, answers


@case()
def a_module_with_hooks() -> None:
    """A hook in front of the forward sees buffers as they were sent."""

    def run(model: Any, step: int) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = model.module.register_forward_pre_hook(
            lambda module, args: seen.append(module.norm.running_mean.clone())
        )
        result = model(data(step))
        handle.remove()
        return result + seen[0]

    stock, compiled = pair(with_statistics)
    answers = check_steps_between_changes(stock, compiled, run)
    assert not any(answers), answers
