"""Results that are computed from one another: the option ``linked_results`` links them as plain PyTorch does."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from torch.autograd import grad

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from tests.autograd.scenarios import check_scenario, for_each, layer, leaf

OPTION = {"linked_results": True}


def hidden_and_result(x, w):
    hidden = torch.tanh(x @ w)
    return hidden, (hidden @ w).exp()


def gradient_between_results(compile):
    f, x, w = compile(hidden_and_result), leaf(3, 3), leaf(3, 3)
    hidden, y = f(x, w)
    between = grad(y.sum(), hidden, retain_graph=True)
    both = grad(y.sum() + hidden.square().sum(), [hidden, x, w])
    return between, both


def kept_gradient(compile):
    f, x, w = compile(hidden_and_result), leaf(3, 3), leaf(3, 3)
    hidden, y = f(x, w)
    hidden.retain_grad()
    y.sum().backward()
    return hidden.grad, x.grad, w.grad


def hook_that_changes(compile):
    f, x, w, seen = compile(hidden_and_result), leaf(3, 3), leaf(3, 3), []
    hidden, y = f(x, w)
    hidden.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
    (y.sum() + hidden.sum()).backward()
    return seen, x.grad, w.grad


def hook_on_a_view_that_views_are_made_of(compile):
    def program(x, w):
        rows = x[:2]
        return rows, rows.expand(2, 2, 3), rows @ w

    f, x, w, seen = compile(program), leaf(3, 3), leaf(3, 3), []
    rows, expanded, product = f(x, w)
    rows.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
    (expanded[0].sum() * 3 + product.sum()).backward()
    return seen, x.grad, w.grad


def loss_and_scores(compile):
    model = nn.Linear(4, 3)

    def program(x, target):
        scores = model(x)
        return nn.functional.cross_entropy(scores, target), scores

    f = compile(program)
    loss, scores = f(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    (by_scores,) = grad(loss, scores, retain_graph=True)
    loss.backward()
    return by_scores, model.weight.grad


def one_after_another(compile):
    def program(x, w):
        states = []
        for _ in range(4):
            x = torch.tanh(x @ w) + x
            states.append(x)
        first, second = x.chunk(2)
        return (*states, first * second.sin(), x.detach().argmax())

    f, x, w = compile(program), leaf(4, 4), leaf(4, 4)
    *states, last, place = f(x, w)
    by_states = [grad(last.sum(), state, retain_graph=True) for state in states]
    (last.sum() + states[1].square().sum()).backward()
    return by_states, x.grad, w.grad, place


def parts_on_the_way(compile):
    def program(x, w, places):
        hidden = torch.tanh(x @ w)
        first, second = hidden.split(2)
        return hidden, first[places] * second[0], hidden[hidden.shape[0] - 1]

    f, x, w = compile(program), leaf(4, 3), leaf(3, 3)
    hidden, product, row = f(x, w, torch.tensor([1, 0, 1]))
    return grad(product.sum() + row.sum(), [hidden, x, w])


def changed_by_the_user(compile):
    f, x, w = compile(hidden_and_result), leaf(3, 3), leaf(3, 3)
    hidden, y = f(x, w)
    hidden = hidden * 2
    hidden.mul_(3)
    (hidden.sum() * y.sum()).backward()
    return x.grad, w.grad


def kept_gradients_of_results_that_are_changed(compile):
    def program(x, w):
        first, second = x * w, (x @ w).sin()
        second.retain_grad()
        return first, second

    f, x, w = compile(program), leaf(3, 3), leaf(3, 3)
    first, second = f(x, w)
    first.retain_grad()
    changed = [result.mul_(2) for result in (first, second)]
    sum(result.square().sum() for result in changed).backward()
    return first.grad, second.grad, x.grad, w.grad


def without_gradients(compile):
    f, x, w = compile(hidden_and_result), leaf(3, 3), leaf(3, 3)
    with torch.no_grad():
        return f(x, w)


def buffers_changed_on_the_way(compile):
    norm = nn.BatchNorm1d(3)

    def program(x, w):
        hidden = norm(x @ w)
        return hidden, norm(hidden.sin())

    f, x, w = compile(program), leaf(4, 3), leaf(3, 3)
    hidden, y = f(x, w)
    return grad(y.square().sum(), [hidden, x, w]), list(norm.buffers())


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        gradient_between_results,
        kept_gradient,
        hook_that_changes,
        hook_on_a_view_that_views_are_made_of,
        loss_and_scores,
        one_after_another,
        parts_on_the_way,
        changed_by_the_user,
        kept_gradients_of_results_that_are_changed,
        without_gradients,
        buffers_changed_on_the_way,
    )
}


@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
@for_each(SCENARIOS)
def test_linked_results(scenario, backend):
    check_scenario(scenario, backend, options=OPTION)


def modes_turned(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        hidden = x @ w
        result = hidden @ w
    return hidden, result


def test_what_cannot_be_cut_is_left_to_torch(caplog):
    compiled = gradsplit.compile(modes_turned, backend="aot_eager", options=OPTION)
    x, w = leaf(3, 3), leaf(3, 3)
    with caplog.at_level(logging.WARNING, "gradsplit"):
        hidden, y = compiled(x, w)
    assert "[linked-results]" in caplog.text
    expected_hidden, expected = modes_turned(x, w)
    torch.testing.assert_close(grad(y.float().sum(), hidden), grad(expected.float().sum(), expected_hidden))


@pytest.mark.parametrize("program", [layer, lambda x, w: (x * w, x + w), lambda x, w: ((x @ w).view(-1), x)])
def test_results_of_their_own_stay_one_graph(program, monkeypatch):
    graphs, compile_stages = [], pipeline.compile_stages

    def counted(module, *given, **options):
        graphs.append(module)
        return compile_stages(module, *given, **options)

    monkeypatch.setattr(pipeline, "compile_stages", counted)
    gradsplit.compile(program, backend="aot_eager", options=OPTION)(leaf(3, 3), leaf(3, 3))
    assert len(graphs) == 1


def test_without_the_option_the_gradient_is_not_found():
    compiled = functools.partial(gradsplit.compile(hidden_and_result, backend="aot_eager", fullgraph=True))
    hidden, y = compiled(leaf(3, 3), leaf(3, 3))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        grad(y.sum(), hidden)


def asks_for_gradients_of_its_own_value(x, w):
    hidden = (x @ w).sin()
    hidden[-1:].zero_()
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), [hidden], retain_graph=True)
    return hidden * gradient, hidden


def asks_beside_a_loss_of_no_elements(x, w):
    hidden = (x @ w).sin()
    loss = nn.functional.mse_loss(x[:0], w[:0])
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), [hidden])
    return hidden.detach() * gradient * x, loss.nan_to_num()


def asks_for_gradients_of_an_input_that_it_changes(x, w):
    hidden = x * 1
    print(end="")
    hidden[-1:].zero_()
    (gradient,) = torch.autograd.grad((hidden @ w).exp().sum(), [hidden], retain_graph=True)
    return hidden * gradient + w, hidden


def asks_for_the_gradient_of_what_it_turns_afterwards(x, w):
    hidden = (x * w).diff(dim=0)
    sums = hidden.sum(1)
    hidden.swapdims_(0, 1)
    (gradient,) = torch.autograd.grad(sums.exp().sum(), [sums], retain_graph=True)
    return hidden * gradient, sums


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def asks_for_the_gradient_of_what_a_function_changes(x, w):
    hidden = Doubled.apply(x @ w)
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), [hidden], retain_graph=True)
    return hidden * gradient, hidden


def asks_for_gradients_of_a_dictionarys_values(x, w):
    inner = {"w": w * 2}
    hidden = (x @ inner["w"]).sin()
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), inner.values(), retain_graph=True)
    return (inner["w"] - gradient) * hidden, hidden


@pytest.mark.parametrize(
    "program",
    [
        asks_for_gradients_of_its_own_value,
        asks_beside_a_loss_of_no_elements,
        asks_for_gradients_of_a_dictionarys_values,
        asks_for_the_gradient_of_what_a_function_changes,
        asks_for_gradients_of_an_input_that_it_changes,
        asks_for_the_gradient_of_what_it_turns_afterwards,
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
def test_program_that_asks_for_the_gradient_of_its_own_value(program, backend):
    compiled = gradsplit.compile(program, backend=backend)
    x, w = leaf(3, 3), leaf(3, 3)
    results, expected = compiled(x, w), program(x, w)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(
        grad(results[0].sum(), [x, w], allow_unused=True), grad(expected[0].sum(), [x, w], allow_unused=True)
    )
