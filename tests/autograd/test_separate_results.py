"""A backward through one result of a graph leaves the history alone that only other results were computed from."""

from __future__ import annotations

import threading

import pytest
import torch

import gradsplit
from gradsplit.compile_core.autograd.bound_graphs.compiled_call import DifferentiableProgram
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, leaf, outcome


def two_of_two(x, y):
    return x.sin() * 2, (y * y).cos()


def shared(x, y, w):
    return (x * w).sin(), (y * w).exp(), x * y


def one_in_both(x, y):
    h = x.sin()
    return h * h, (h * y).exp()


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("no gradient leads here")


def after_no_derivative(compile):
    a, b = leaf(3), leaf(3)
    first, second = compile(two_of_two)(a * 2, torch.floor_divide(b, 0.5))
    first.sum().backward()
    return a.grad, b.grad, outcome(second.sum().backward)


def after_a_function(compile):
    a, b = leaf(3), leaf(3)
    first, _ = compile(two_of_two)(a * 2, Refusing.apply(b))
    first.sum().backward()
    return a.grad, b.grad


class NothingForFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return y * 3

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * 3


def before_a_function_that_gives_nothing(compile):
    a, b = leaf(3), leaf(3)
    program = compile(lambda x, y: (x.sin(), NothingForFirst.apply(y, torch.ones(3))))
    first, _ = program(a * 2, Refusing.apply(b))
    first.sum().backward()
    return a.grad, b.grad


def hooks_of_the_history(compile):
    a, b, seen = leaf(3), leaf(3), []
    x, y = a * 2, b * 3
    x.register_hook(lambda gradient: seen.append(("x", gradient * 2)))
    y.register_hook(lambda gradient: seen.append(("y", gradient * 2)))
    y.grad_fn.register_prehook(lambda gradients: seen.append(("node of y", *gradients)))
    first, second = compile(two_of_two)(x, y)
    first.sum().backward()
    seen.append("then")
    second.sum().backward()
    return seen, a.grad, b.grad


def changed_where_only_the_other_reads(compile):
    a, b, factor = leaf(3), leaf(3), torch.ones(3)
    first, second = compile(two_of_two)(a * 2, b * factor)
    factor.add_(1)
    first.sum().backward()
    return a.grad, outcome(second.sum().backward)[0]


def one_after_the_other(compile):
    found = []
    for chosen in ([0, 1], [1, 0], [0, 0], [2, 0], [1, 2]):
        a, b, w = leaf(3), leaf(3), leaf(3)
        results = compile(shared)(a.exp(), b.exp(), w)
        for k in chosen:
            found.append([outcome(results[k].sum().backward), a.grad, b.grad, w.grad])
    # A graph frees what several of its results read after the first backward, too.
    return [[error and error[0], *gradients] for error, *gradients in found]


def several_at_once(compile):
    a, b, w = leaf(3), leaf(3), leaf(3)
    x, y = a.exp(), b.exp()
    results = compile(shared)(x, y, w)
    found = [
        outcome(
            lambda *given: torch.autograd.grad(*given, retain_graph=True),
            [results[k] for k in chosen],
            inputs,
            [torch.ones(3)] * len(chosen),
        )
        for chosen in ([0], [1, 2], [0, 1, 2], [2, 2])
        for inputs in ([a, b, w], [x, y], [x], [w])
    ]
    results[0].mul_(3)
    sum(result.sum() for result in results).backward()
    return *found, a.grad, b.grad, w.grad


def several_results(compile):
    a, b, w = leaf(3), leaf(3), leaf(3)
    sum(result.sum() for result in compile(shared)(a.exp(), b.exp(), w)).backward()
    return a.grad, b.grad, w.grad


def of_another_thread(compile):
    """Its operations have lower numbers than the graph's, so that the engine comes to them last."""
    a, b, parts = leaf(3), leaf(3), []
    first, second = compile(one_in_both)(a.exp(), b.exp())
    thread = threading.Thread(target=lambda: parts.append(first.sin().sum()))
    thread.start()
    thread.join()
    loss = parts[0] + second.sum()
    loss.backward()
    return a.grad, b.grad, outcome(loss.backward)[0]


def with_history(compile):
    a, b = leaf(3), leaf(3)
    first, second = compile(two_of_two)(a * 2, b.floor_divide(2))
    return torch.autograd.grad(first.sum(), a, create_graph=True)[0].detach(), second


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        after_no_derivative,
        after_a_function,
        before_a_function_that_gives_nothing,
        hooks_of_the_history,
        changed_where_only_the_other_reads,
        one_after_the_other,
        several_at_once,
        several_results,
        of_another_thread,
        with_history,
    )
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
@for_each(SCENARIOS)
def test_history(scenario, backend):
    check_scenario(scenario, backend)


@pytest.mark.parametrize(("use", "expected"), [(several_results, 1), (of_another_thread, 2)])
def test_the_backward_program_runs_again_for_late_gradients_only(use, expected, monkeypatch):
    runs, differentiate = [], DifferentiableProgram.differentiate
    monkeypatch.setattr(
        DifferentiableProgram, "differentiate", lambda *given: runs.append(1) or differentiate(*given)
    )
    use(gradsplit.compile)
    assert len(runs) == expected
