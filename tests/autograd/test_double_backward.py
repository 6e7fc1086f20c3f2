"""Gradients that are differentiated again: with the option as in plain Python, without it an error, never zeros."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian, hvp, jacobian, jvp

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from gradsplit.compile_core.errors import Unsupported
from tests.autograd.compare_with_eager import compile_program
from tests.autograd.scenarios import check_scenario, for_each, layer, leaf, two_results

OPTION = {"double_backward": True}
FORMS = {
    "eager": {"backend": "eager"},
    "aot_eager": {"backend": "aot_eager", "options": OPTION},
    "default": {"backend": DEFAULT_BACKEND, "options": OPTION},
}


def penalty_outside(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)
    (g,) = grad(y.sum(), x, create_graph=True)
    (g.square().sum() + y.sum()).backward()
    return x.grad, w.grad


def critic_with_penalty(compile):
    critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    f, losses = compile(critic), []
    for _ in range(3):
        real, fake, share = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (g,) = grad(f(between).sum(), between, create_graph=True)
        loss = f(fake).mean() - f(real).mean() + 10 * (g.norm(2, dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, list(critic.parameters()), list(critic.buffers())


def asked_for_inside(compile):
    def program(x, w):
        y = (x * w).sin().sum()
        (g,) = grad(y, x, create_graph=True)
        return y + g.square().sum()

    f, x, w = compile(program), leaf(3), leaf(3)
    loss = f(x, w)
    loss.backward()
    return loss, x.grad, w.grad


def some_results_only(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, _ = f(x, w)
    gradients = grad(first.sum(), [x, w], create_graph=True)
    (gradients[0] * gradients[1]).sum().backward()
    return x.grad, w.grad


def results_in_one_memory(compile):
    def program(x):
        rows = (x * x).sin()
        return rows[0], rows[1:]

    f, x = compile(program), leaf(3, 3)
    first, rest = f(x)
    (g,) = grad(first.sum() + (rest * rest).sum(), x, create_graph=True)
    g.square().sum().backward()
    return x.grad


def third_order(compile):
    f, x = compile(lambda x: x.sin() * x), leaf(3)
    value = f(x)
    for _ in range(3):
        (value,) = grad(value.sum(), x, create_graph=True)
    return value


def what_the_program_detaches(compile):
    def program(x, w):
        with torch.no_grad():
            scale = x.exp()
        return (x.detach() * x * w * scale).sin()

    f, x, w = compile(program), leaf(3), leaf(3)
    (g,) = grad(f(x, w).sum(), x, create_graph=True)
    return grad(g.sum(), [x, w])


def activations_as_inputs(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    hidden = (x * 2).sin()
    (g,) = grad(f(hidden, w).sum(), hidden, create_graph=True)
    again = grad(g.square().sum(), hidden, retain_graph=True)
    g.square().sum().backward()
    return again, x.grad, w.grad


def by_the_gradients_that_arrive(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    direction = leaf(3, 3)
    (g,) = grad(f(x, w), x, direction, create_graph=True)
    g.square().sum().backward()
    return x.grad, w.grad, direction.grad


def under_autocast(compile):
    f, x, w = compile(lambda x, w: (x @ w).tanh()), leaf(4, 4), leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = f(x, w)
    (g,) = grad(y.float().sum(), x, create_graph=True)
    g.square().sum().backward()
    return y, x.grad, w.grad


def hooks_run_once(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    hidden, calls = x * 2, []
    hidden.register_hook(lambda g: calls.append(g.detach().clone()))
    (g,) = grad(f(hidden, w).sum(), x, create_graph=True)
    g.sum().backward()
    return calls, x.grad, w.grad


def created_but_not_used(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    gradients = grad(f(x, w).sum(), [x, w], create_graph=True)
    return [g.detach() for g in gradients], [g.requires_grad for g in gradients]


def functionals(compile):
    f, x = compile(lambda x: x.tanh().exp().sum()), torch.randn(3)
    g = compile(lambda x: x.tanh().exp())
    return (
        hessian(f, x),
        hessian(f, x, vectorize=True),
        hvp(f, x, torch.ones(3)),
        jvp(g, x, torch.ones(3)),
        jacobian(g, x, create_graph=True),
    )


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        penalty_outside,
        critic_with_penalty,
        some_results_only,
        results_in_one_memory,
        third_order,
        what_the_program_detaches,
        activations_as_inputs,
        by_the_gradients_that_arrive,
        under_autocast,
        hooks_run_once,
        created_but_not_used,
        functionals,
    )
}


@for_each(FORMS, "form")
@for_each(SCENARIOS)
def test_differentiated_twice(scenario, form):
    check_scenario(scenario, **form)


@for_each(FORMS, "form")
def test_gradients_asked_for_inside(form):
    check_scenario(asked_for_inside, breaks=True, **form)


@for_each(FORMS, "form")
def test_numerical_check(form):
    compiled = gradsplit.compile(layer, fullgraph=True, **form)
    inputs = leaf(2, 2, dtype=torch.float64), leaf(2, 2, dtype=torch.float64)
    assert gradcheck(compiled, inputs, check_batched_grad=True)
    assert gradgradcheck(compiled, inputs, check_batched_grad=True)


def test_only_what_is_differentiated_again_leaves_the_compiled_backward():
    inputs = leaf(3, 3), leaf(3, 3)
    compiled = compile_program(layer, inputs, options=OPTION)
    calls = []
    assert compiled.backward is not None
    compiled.backward.observer = _Calls(calls)
    (y,) = compiled(*inputs)
    y.sum().backward(retain_graph=True)
    assert calls == ["backward"]
    grad(y.sum(), inputs, create_graph=True)
    assert calls == ["backward"]


class _Calls:
    def __init__(self, calls):
        self.calls = calls

    def region_started(self, name):
        self.calls.append(name)

    def region_finished(self, name):
        pass


def _draws(x):
    return nn.functional.dropout(x * 2, 0.5)


def _changes(x):
    x.mul_(2)
    return x.sin()


@pytest.mark.parametrize(
    ("program", "message"), [(_draws, "draws random numbers"), (_changes, "changes an input")]
)
@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
def test_graphs_left_to_torch(backend, program, message, caplog):
    compiled = gradsplit.compile(program, backend=backend, options=OPTION)
    gradients = []
    for run in (program, compiled):
        torch.manual_seed(0)
        x = leaf(5)
        (g,) = grad(run(x * 1).square().sum(), x, create_graph=True)
        gradients.append(grad(g.sum(), x))
    assert message in caplog.text
    torch.testing.assert_close(*gradients)


# Each differentiates a gradient of ``compiled`` in another way.


def _by_a_leaf(compiled):
    x, w = leaf(3, 3), leaf(3, 3)
    (g,) = grad(compiled(x, w).sum(), x, create_graph=True)
    grad(g.sum(), x, allow_unused=True)


def _by_another_input(compiled):
    x, w = leaf(3, 3), leaf(3, 3)
    (g,) = grad(compiled(x, w).sum(), x, create_graph=True)
    grad(g.sum(), w, allow_unused=True)


def _by_an_activation(compiled):
    hidden, w = leaf(3, 3) * 2, leaf(3, 3)
    (g,) = grad(compiled(hidden, w).sum(), hidden, create_graph=True)
    grad(g.sum(), hidden, allow_unused=True)


def _by_what_arrived(compiled):
    x, direction = leaf(3, 3), leaf(3, 3)
    (g,) = grad(compiled(x, leaf(3, 3)), x, direction, create_graph=True)
    grad(g.sum(), direction, allow_unused=True)


def _by_backward(compiled):
    x = leaf(3, 3)
    (g,) = grad(compiled(x, leaf(3, 3)).sum(), x, create_graph=True)
    g.square().sum().backward()


def _hessian(compiled):
    hessian(lambda x: compiled(x, x).sum(), torch.randn(3, 3))


def _hessian_of_an_activation(compiled):
    hessian(lambda x: compiled(x, x).sum(), leaf(3, 3) * 2, create_graph=True)


WITHOUT = {
    attempt.__name__.strip("_"): attempt
    for attempt in (
        _by_a_leaf,
        _by_another_input,
        _by_an_activation,
        _by_what_arrived,
        _by_backward,
        _hessian,
        _hessian_of_an_activation,
    )
}
PROGRAMS = {"saves its inputs": layer, "saves no input": lambda x, w: (x + w).exp().sin()}


@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
@for_each(PROGRAMS, "program")
@for_each(WITHOUT, "attempt")
def test_without_the_option_it_is_an_error(attempt, program, backend):
    compiled = functools.partial(gradsplit.compile(program, backend=backend, fullgraph=True))
    with pytest.raises(Unsupported, match="double_backward") as raised:
        attempt(compiled)
    assert "\n" not in str(raised.value)


def test_without_the_option_gradients_with_a_history_have_the_same_values():
    def values(compile):
        f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
        gradients = grad(f(x, w).sum(), [x, w], create_graph=True)
        return [g.detach() for g in gradients], [g.requires_grad for g in gradients]

    check_scenario(values, "aot_eager")
