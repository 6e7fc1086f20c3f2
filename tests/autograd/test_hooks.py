"""Hooks of tensors, parameters, nodes and modules around compiled calls, and those registered inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf, outcome, two_results


class Log:
    """Collects copies of the gradients that hooks see, by name: hooks of different tensors have no order."""

    def __init__(self) -> None:
        self.seen: dict[str, list] = {}

    def hook(self, name: str, factor: float | None = None):
        def run(gradient):
            copied = None if gradient is None else gradient.detach().clone()
            self.seen.setdefault(name, []).append(copied)
            return None if factor is None else gradient * factor

        return run

    def accumulated(self, name: str):
        return lambda parameter: self.hook(name)(parameter.grad)

    def sorted(self):
        return sorted(self.seen.items())


def on_leaves_and_results(compile):
    f, x, w, log = compile(layer), leaf(3, 3), leaf(3, 3), Log()
    x.register_hook(log.hook("x", 2))
    w.register_hook(log.hook("w"))
    y = f(x, w)
    y.register_hook(log.hook("y", 3))
    y.sum().backward()
    return x.grad, w.grad, log.sorted()


def registered_after_the_first_call(compile):
    f, x, w, log = compile(layer), leaf(3, 3), leaf(3, 3), Log()
    f(x, w).sum().backward()
    handle = x.register_hook(log.hook("x", 2))
    y = f(x, w)
    y.register_hook(log.hook("y", 3))
    y.sum().backward(retain_graph=True)
    handle.remove()
    y.sum().backward()
    return x.grad, w.grad, log.sorted()


def registered_between_forward_and_backward(compile):
    f, x, w, log = compile(layer), leaf(3, 3), leaf(3, 3), Log()
    y = f(x, w)
    x.register_hook(log.hook("x", 2))
    y.register_hook(log.hook("first", 3))
    y.register_hook(log.hook("second", 5))
    y.sum().backward()
    return x.grad, w.grad, log.sorted()


def on_activations(compile):
    f, x, w, log = compile(layer), leaf(3, 3), leaf(3, 3), Log()
    hidden = x * 2
    hidden.register_hook(log.hook("hidden", 5))
    hidden.retain_grad()
    f(f(hidden, w).sin(), w).sum().backward()
    return x.grad, w.grad, hidden.grad, log.sorted()


def after_accumulation(compile):
    model, log = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), Log()
    f = compile(model)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(log.accumulated(name))
    for _ in range(2):
        f(torch.randn(2, 3)).sum().backward()
    return log.sorted()


def optimizer_in_the_backward(compile):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    f = compile(model)

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(3):
        loss = f(torch.ones(2, 3)).square().sum()
        loss.backward()
        losses.append(loss)
    return losses, [parameter.grad for parameter in model.parameters()]


def on_several_tensors(compile):
    f, x, w, calls = compile(two_results), leaf(3), leaf(3), []

    def note(gradients):
        calls.append([None if gradient is None else gradient.clone() for gradient in gradients])

    first, second = f(x, w)
    register_multi_grad_hook([first, second], note)
    register_multi_grad_hook([x, w], note)
    (first.sum() + second.sum()).backward()
    return sorted(calls, key=len), len(calls)


def for_the_first_of_several(compile):
    f, x, w, calls = compile(two_results), leaf(3), leaf(3), []
    first, second = f(x, w)
    register_multi_grad_hook([first, second], lambda gradient: calls.append(gradient.shape), mode="any")
    (first * second).sum().backward()
    return calls


def on_nodes(compile):
    f, x = compile(lambda x: x.sin()), leaf(3)
    y = f(x)
    y.grad_fn.register_prehook(lambda arriving: (arriving[0] * 2,))
    y.grad_fn.register_hook(lambda made, arrived: (made[0] * 3 + arrived[0],))
    y.sum().backward()
    return x.grad


def that_raise(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)

    def refuse(gradient):
        raise ValueError("no gradient")

    handle = y.register_hook(refuse)
    failed = outcome(lambda: y.sum().backward(retain_graph=True))
    handle.remove()
    y.sum().backward()
    return failed, x.grad, w.grad


def that_call_compiled_functions(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    x.register_hook(lambda gradient: f(gradient, w.detach()))
    f(x, w).sum().backward()
    return x.grad, w.grad


AROUND = {
    scenario.__name__: scenario
    for scenario in (
        on_leaves_and_results,
        registered_after_the_first_call,
        registered_between_forward_and_backward,
        on_activations,
        after_accumulation,
        optimizer_in_the_backward,
        on_several_tensors,
        for_the_first_of_several,
        on_nodes,
        that_raise,
        that_call_compiled_functions,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(AROUND)
def test_hooks_around_a_call(scenario, backend):
    check_scenario(scenario, backend)


def on_an_intermediate(compile):
    log = Log()

    def program(x):
        y = x.cos()
        y.register_hook(log.hook("y", 3))
        return y.sin() * y

    f, x = compile(program), leaf(3)
    for _ in range(2):
        f(x).sum().backward()
    return x.grad, log.sorted()


def on_an_input(compile):
    log = Log()

    def program(x):
        x.register_hook(log.hook("x", 3))
        return x.sin()

    f, x = compile(program), leaf(3)
    for _ in range(2):
        f(x).sum().backward()
    return x.grad, log.sorted()


def removed_again(compile):
    log = Log()

    def program(x):
        y = x.cos()
        handle = y.register_hook(log.hook("y", 3))
        z = y.sin()
        handle.remove()
        return z * y

    f, x = compile(program), leaf(3)
    f(x).sum().backward()
    return x.grad, log.sorted()


def on_a_module_inside(compile):
    log = Log()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[1].register_full_backward_hook(lambda module, made, arrived: log.hook("tanh")(made[0]))
    f, x = compile(model), leaf(2, 3)
    for _ in range(2):
        f(x).sum().backward()
    return x.grad, log.sorted()


def kept_gradient(compile):
    def program(x):
        y = x * 2
        y.retain_grad()
        return y.sin(), y

    f, x = compile(program), leaf(3)
    z, y = f(x)
    z.sum().backward()
    return x.grad, y.grad


INSIDE = {
    scenario.__name__: scenario
    for scenario in (on_an_intermediate, on_an_input, removed_again, on_a_module_inside, kept_gradient)
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(INSIDE)
def test_hooks_registered_inside(scenario, backend):
    check_scenario(scenario, backend, breaks=True)
