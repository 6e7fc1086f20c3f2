"""``torch.autograd.grad`` and ``backward`` over compiled results: several roots, some inputs, several times."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf, outcome, two_results


def retained(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)
    gradients = [grad(y.sum(), [x, w], retain_graph=True) for _ in range(3)]
    y.sum().backward()
    return gradients, x.grad, w.grad, outcome(lambda: y.sum().backward())


def twice_from_one_loss(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    loss = f(x, w).sum()
    loss.backward()
    return outcome(loss.backward), x.grad


def nothing_to_keep(compile):
    f, x = compile(lambda x: x + 1), leaf(3)
    y = f(x)
    y.sum().backward()
    y.sum().backward()
    return x.grad


def accumulated(compile):
    model = nn.Linear(3, 3)
    f, optimizer, seen = compile(model), torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(6):
        f(torch.randn(2, 3)).sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


def of_chosen_tensors(compile):
    f, x, w, other = compile(two_results), leaf(3), leaf(3), leaf(3)
    first, second = f(x, w)
    ones, numbers = torch.ones(3), torch.arange(3.0)
    return (
        grad(first.sum(), [x, w], retain_graph=True),
        grad([first, second], x, [ones, numbers], retain_graph=True),
        grad([first, second.sum()], w, [ones, None], retain_graph=True),
        grad(first.sum() + other.sum(), [x, other], retain_graph=True),
        grad(second.sum(), [x, other], allow_unused=True, retain_graph=True),
        grad(second.sum(), [x, other], materialize_grads=True, retain_graph=True),
        outcome(lambda: grad(second.sum(), other, retain_graph=True)),
        grad((first * second).sum(), [first, second, x], retain_graph=True),
        outcome(lambda: grad(first, x, torch.ones(4), retain_graph=True)),
        outcome(lambda: grad(first, x, retain_graph=True)),
    )


def into_chosen_leaves(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, second = f(x, w)
    (first + second).sum().backward(inputs=[x])
    return x.grad, w.grad


def from_several_roots(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, second = f(x, w)
    torch.autograd.backward([first, second, first.sum()], [torch.ones(3), torch.ones(3) * 2, None])
    return x.grad, w.grad


def one_root_after_another(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, second = f(x, w)
    first.sum().backward(retain_graph=True)
    middle = x.grad.clone()
    second.sum().backward()
    return middle, x.grad, w.grad


def within_a_larger_graph(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    hidden = (x * 2).relu()
    y = f(hidden, w)
    (f(y.softmax(-1), w) * hidden * y).sum().backward()
    return x.grad, w.grad


def two_calls_before_the_backward(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    (f(x, w) + f(2 * x, w)).sum().backward()
    return x.grad, w.grad


def backwards_in_another_order(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    results = [f(x * k, w) for k in range(3)]
    gradients = []
    for k in (1, 2, 0):
        results[k].sum().backward()
        gradients.append(x.grad.clone())
    return gradients


def compiled_inside_compiled(compile):
    inner = compile(layer)
    f, x, w = compile(lambda x, w: inner(x, w) + inner(x + 1, w)), leaf(3, 3), leaf(3, 3)
    f(x, w).sum().backward()
    return x.grad, w.grad


class _Stop(torch.autograd.Function):
    """Sends no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return None


def undefined_gradients(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, second = f(x, w)
    (_Stop.apply(first).sum() + second.sum()).backward()
    some = x.grad
    x.grad = None
    first, second = f(x, w)
    (_Stop.apply(first).sum() + _Stop.apply(second).sum()).backward()
    return some, x.grad


class _Nested(torch.autograd.Function):
    """Calls a compiled function, and its backward, in its own backward."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            inner = gradients[0].detach().requires_grad_()
            ctx.f(inner, inner).sum().backward()
        return inner.grad, None


def backward_in_a_backward(compile):
    # In double precision: what is left of 1 where tanh is nearly that depends on its rounding.
    f, x, w = compile(layer), leaf(3, 3, dtype=torch.float64), leaf(3, 3, dtype=torch.float64)
    _Nested.apply(f(x, w), f).sum().backward()
    return x.grad, w.grad


def parameters_frozen_and_replaced(compile):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    f, x, seen = compile(model), torch.randn(2, 3), []

    def note(y):
        seen.append((y, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))

    for change in (
        lambda: None,
        lambda: model[0].requires_grad_(False),
        lambda: setattr(model[1], "weight", nn.Parameter(torch.ones(3, 3))),
        lambda: setattr(model[1].weight, "data", torch.full((3, 3), 2.0)),
    ):
        change()
        model.zero_grad()
        y = f(x)
        y.sum().backward()
        note(y)
    model.requires_grad_(False)
    note(f(x))
    return seen


def sparse_gradients_arriving(compile):
    f, w = compile(lambda w: w * 2), leaf(5, 3)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), f(w), sparse=True)
    rows.sum().backward()
    return w.grad.to_dense()


def gradients_that_users_keep(compile):
    f, x, w, arriving = compile(lambda x, w: x + w), leaf(3), leaf(3), torch.ones(3)
    f(x, w).backward(arriving)
    x.grad.add_(1)
    return arriving, x.grad, w.grad


def states_passed_on(compile):
    cell = nn.GRUCell(3, 3)
    f, state = compile(cell), torch.zeros(2, 3)
    for step in range(6):
        state = f(torch.randn(2, 3), state)
        if step % 3 == 2:
            state.square().sum().backward()
            state = state.detach()
    return state, [parameter.grad for parameter in cell.parameters()]


def complex_numbers(compile):
    f, x = compile(lambda x: (x * (1 + 2j)).exp()), leaf(3, dtype=torch.complex64)
    f(x).abs().sum().backward()
    return x.grad


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        retained,
        twice_from_one_loss,
        nothing_to_keep,
        accumulated,
        of_chosen_tensors,
        into_chosen_leaves,
        from_several_roots,
        one_root_after_another,
        within_a_larger_graph,
        two_calls_before_the_backward,
        backwards_in_another_order,
        compiled_inside_compiled,
        undefined_gradients,
        backward_in_a_backward,
        parameters_frozen_and_replaced,
        sparse_gradients_arriving,
        gradients_that_users_keep,
        states_passed_on,
        complex_numbers,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_gradients_of_results(scenario, backend):
    check_scenario(scenario, backend)


def test_a_history_that_no_gradient_leads_to() -> None:
    """The operator before has no derivative, and is not to be asked for one."""

    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unique = torch.unique(a)  # ends a graph
        dead = unique.exp()
        del dead
        return unique.detach() + 1, a.sin()

    a = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
    found, result = gradsplit.compile(program, backend="aot_eager")(a)
    assert torch.equal(found, torch.tensor([2.0, 3.0]))
    (gradient,) = torch.autograd.grad(result.sum(), a)
    torch.testing.assert_close(gradient, a.detach().cos())


def test_a_changed_history_that_no_gradient_leads_to() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        h = a * 2
        h.set_(h.clone())  # has no derivative, and ends a graph
        h.data.mul_(2)
        return a.sin()

    a = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(gradsplit.compile(program, backend="aot_eager")(a).sum(), a)
    torch.testing.assert_close(gradient, a.detach().cos())
