"""Saved tensors that the user changes before the backward: torch's own error, and none without need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.autograd.bound_graphs.later_changes import LaterChanges
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf


def failure_of(loss):
    """The beginning of the error: its end names the operation, which compiled calls have not."""
    try:
        loss.backward()
    except RuntimeError as error:
        text = str(error)
        assert "expected version" in text
        return text.partition(":")[0]
    return None


def an_input(compile):
    f, x, w = compile(lambda x, w: x * w), torch.randn(3), leaf(3)
    y = f(x, w)
    x.add_(1)
    return failure_of(y.sum())


def a_parameter(compile):
    model = nn.Linear(3, 3)
    f, optimizer = compile(model), torch.optim.SGD(model.parameters(), 0.1)
    y = f(f(leaf(2, 3)))
    (first,) = torch.autograd.grad(y.sum(), model.weight, retain_graph=True)
    model.weight.grad = first
    optimizer.step()
    return failure_of(y.sum())


def a_result(compile):
    def program(x):
        product = x @ x
        return product, product.sin()

    f, x = compile(program), leaf(2, 2)
    product, sine = f(x)
    product.add_(1)
    return failure_of(sine.sum())


def through_a_view(compile):
    f, x, w = compile(layer), torch.randn(3, 3), leaf(3, 3)
    y = f(x, w)
    x[0].zero_()
    return failure_of(y.sum())


def by_the_next_call(compile):
    def program(x, memory):
        y = x * memory
        memory.add_(1)
        return y

    def changed_later(x, memory):
        return x * memory

    f, g, x, memory = compile(program), compile(changed_later), leaf(3), torch.ones(3)
    y = g(x, memory)
    with torch.no_grad():
        f(x, memory)
    return failure_of(y.sum())


def a_result_that_nobody_needs(compile):
    f, x = compile(lambda x: x.sin()), leaf(3)
    y = f(x)
    y.add_(1)
    return failure_of(y.sum()), x.grad


def statistics_of_a_norm(compile):
    model = nn.BatchNorm1d(3)
    f, x = compile(model), leaf(4, 3)
    first, second = f(x), f(x * 2)
    failed = failure_of(first.square().sum() + second.cos().sum())
    return failed, x.grad, list(model.buffers())


def constants_that_are_results(compile):
    """The backward reads equal ones, and none for the size of something else."""

    def program(x, index):
        zeros = torch.zeros(3, 2)
        return x.gather(0, index).sin(), zeros, zeros.t()

    f, x, index = compile(program), leaf(3, 2), torch.tensor([[0, 1]])
    result, *others = f(x, index)
    for other in others:
        other.add_(1)
    return failure_of(result.sum()), x.grad


def an_input_that_gives_its_size(compile):
    def program(x, size):
        return torch.ones(3, 2).scatter_add(0, torch.zeros_like(size, dtype=torch.int64), x)

    f, x, size = compile(program), leaf(1, 2), torch.randn(1, 2)
    result = f(x, size)
    size.add_(1)
    return failure_of(result.sum()), x.grad


def for_a_gradient_that_nobody_asks_for(compile):
    def program(x, y):
        return x.sin() + y * y

    f = compile(program)

    def called():
        x, y = leaf(3), leaf(3)
        product = y.clone()
        result = f(x, product)
        with torch.no_grad():
            product.mul_(2)
        return x, product, result.sum()

    x, _, total = called()
    (returned,) = torch.autograd.grad(total, x)
    x, _, total = called()
    total.backward(inputs=[x])
    x, product, total = called()
    with pytest.raises(RuntimeError, match="expected version"):
        torch.autograd.grad(total, [x, product])
    return returned, x.grad


def saved_for_another_result_only(compile):
    """The square saves what it takes, and activations their own results; nothing comes to the square."""

    def program(x):
        t = x + 1
        return t, t * t, (t + 0.0).relu().sigmoid()

    x = leaf(4)
    t, _, y = compile(program)(x)
    t.add_(1)
    failure = failure_of(y.sum())
    return y, x.grad, failure


def what_no_operation_saves(compile):
    """Eager operations save what they compute from it, also of buffers that are filled again before the backward."""

    def program(frame, scale, w):
        seen = frame.to(w.dtype) / scale
        doubled = (seen @ w) * 2
        return doubled, doubled.exp() + 1

    f, w, frame, scale = compile(program), leaf(3, 3), torch.arange(9).view(3, 3), torch.tensor(4.0)
    found = []
    for _ in range(3):
        losses = []
        for _ in range(2):
            doubled, result = f(frame, scale, w)
            losses.append(result.sum())
            frame.add_(1)
            scale.add_(1)
            doubled.detach().zero_()
        found.append([failure_of(sum(losses)), w.grad])
        w.grad = None
    return found


def detached_from_the_count(compile):
    f, x, w = compile(lambda x, w: x * w), leaf(3), torch.ones(3)
    y = f(x, w)
    w.data.fill_(2.0)
    return failure_of(y.sum()), x.grad


class Scaled(nn.Module):
    """To eager operators a scale itself is given, and a weight transposed, which is how the latter is saved."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer, self.last = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.layer(x * self.scale).tanh())


def other_memory_for_parameters(compile):
    model = Scaled()
    f, x = compile(model), leaf(3, 4)
    found = []
    for offset in (2, 1):
        loss = f(x).sum()
        flat = torch.arange(60.0)
        for parameter in model.parameters():
            parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        loss.backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    return found


def storages_freed_and_made_again(compile):
    """As FSDP does with the weights of a layer between its forward and its backward."""
    model = Scaled()
    f, x = compile(model), leaf(3, 4)
    found = []
    for _ in range(2):
        loss, values, others = f(x).sum(), [p.detach().clone() for p in model.parameters()], []
        for parameter in model.parameters():
            parameter.untyped_storage().resize_(0)
            others.append(torch.empty_like(parameter))
        for parameter, value in reversed([*zip(model.parameters(), values, strict=True)]):
            parameter.untyped_storage().resize_(value.nbytes)
            parameter.data.copy_(value)
        loss.backward()
        found.append([x.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    return found


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        an_input,
        a_parameter,
        a_result,
        through_a_view,
        by_the_next_call,
        a_result_that_nobody_needs,
        statistics_of_a_norm,
        constants_that_are_results,
        an_input_that_gives_its_size,
        for_a_gradient_that_nobody_asks_for,
        saved_for_another_result_only,
        what_no_operation_saves,
        detached_from_the_count,
        other_memory_for_parameters,
        storages_freed_and_made_again,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_tensors_changed_before_the_backward(scenario, backend):
    check_scenario(scenario, backend)


def test_copies_until_the_first_backward(monkeypatch):
    """Which sees that nothing changes what the program saves; a change later is an error once."""
    calls, copy = [], LaterChanges.copy
    monkeypatch.setattr(LaterChanges, "copy", lambda *given: calls.append(given) or copy(*given))
    f, w, frame = gradsplit.compile(lambda frame, w: (frame / 4) * w), leaf(3), torch.ones(3)
    first, second = f(frame, w), f(frame, w)
    (first + second).sum().backward()
    assert len(calls) == 2
    f(frame, w).sum().backward()
    assert len(calls) == 2
    result = f(frame, w)
    frame.add_(1)
    assert failure_of(result.sum()) is not None
    for _ in range(2):
        w.grad, result = None, f(frame, w)
        expected = frame / 4
        frame.add_(1)
        result.sum().backward()
        torch.testing.assert_close(w.grad, expected)
