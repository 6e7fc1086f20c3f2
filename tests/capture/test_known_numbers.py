"""Decisions by numbers that follow from what tensors of the CPU hold: step counts, flags, counters of modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

import gradsplit
from tests.capture.same_as_plain import Graphs, check_same


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if self.training and self.seen < 3:
            x = x * 0.5
        self.seen += 1
        if self.seen == 2:
            x = x + 1
        return self.linear(x)


def test_a_counter_makes_a_graph_for_each_way_through() -> None:
    torch.manual_seed(0)
    plain, graphs = Counting(), Graphs()
    compiled = gradsplit.compile(copy.deepcopy(plain), backend=graphs, fullgraph=True)
    for _ in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(plain(x), compiled(x))
        assert plain.seen == compiled.seen
    assert graphs.count == 3


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]
)
def test_radam_steps_in_graphs(options) -> None:
    """It rectifies from the sixth step on."""
    results, graphs = [], Graphs()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = optim.RAdam(model.parameters(), lr=0.1, **options)

        def step(model=model, optimizer=optimizer):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()

        run = gradsplit.compile(step, backend=graphs, fullgraph=True) if compiled else step
        for _ in range(9):
            run()
        results.append([*model.parameters(), *optimizer.state.values()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert graphs.count == 3


def test_moving_averages_of_a_model_are_one_graph() -> None:
    model, graphs = nn.Linear(3, 2), Graphs()
    averages = [optim.swa_utils.AveragedModel(model) for _ in range(2)]
    update = gradsplit.compile(averages[1].update_parameters, backend=graphs, fullgraph=True)
    for _ in range(4):
        with torch.no_grad():
            model.weight.add_(1)
        averages[0].update_parameters(model)
        update(model)
        assert torch.equal(averages[0].module.weight, averages[1].module.weight)
        assert averages[0].n_averaged == averages[1].n_averaged
    assert graphs.count == 2


def before_a_change(x, t):
    late = t > 1.5
    t += 1
    return x * 2 if late else x * 3


def after_changes(x, t):
    y = t.clone()
    y.add_(1)
    y *= 2
    if y > 5:
        return x * y
    t += 1
    return x + y


def changed_itself(x, t):
    t.sub_(1)
    return x * 2 if t else x * 3


@pytest.mark.parametrize("program", [before_a_change, after_changes, changed_itself])
def test_the_number_is_that_of_the_line(program) -> None:
    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    x, one, other = torch.randn(4), torch.zeros(()), torch.zeros(())
    for _ in range(5):
        assert torch.equal(program(x, one), compiled(x, other)) and one == other


def through_a_view(x, t):
    t.view(1).add_(1)
    return x * 2 if t > 1.5 else x * 3


def through_data(x, t):
    t.data += 1
    return x * 2 if t > 1.5 else x * 3


def of_an_item(x, t):
    first = t.view(1)[0]
    t.add_(1)
    return x * 2 if first > 1.5 else x * 3


def turned(x, t):
    late = t > -1
    late.view(1).logical_not_()
    return x * 2 if late else x * 3


def turned_below_a_view(x, t):
    whole = t > -1
    late = whole.view(1)
    torch.logical_not(whole, out=whole)
    return x * 2 if late else x * 3


def overwritten(x, t):
    late = t > -1
    late[...] = False
    return x * 2 if late else x * 3


def random(x, t):
    return x * 2 if t + torch.rand(()) > 0.5 else x * 3


@pytest.mark.parametrize(
    "program", [through_a_view, through_data, of_an_item, turned, turned_below_a_view, overwritten, random]
)
def test_what_does_not_follow_is_left_to_plain_python(program) -> None:
    compiled = check_same(program, lambda: (torch.randn(4), torch.zeros(())), fullgraph=False)
    x, one, other = torch.randn(4), torch.zeros(()), torch.zeros(())
    for seed in range(4):
        torch.manual_seed(seed)
        expected = program(x, one)
        torch.manual_seed(seed)
        assert torch.equal(expected, compiled(x, other)) and one == other
