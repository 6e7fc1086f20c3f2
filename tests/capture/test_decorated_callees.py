"""What a call at a graph break runs, where a decorator or an optimizer stands before the program's own code."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from torch import nn, optim

import gradsplit
from tests.capture.same_as_plain import check_same


def breaks():
    sys.stdout.flush()


@torch.no_grad()
def without_gradients(x):
    y = x * 2
    breaks()
    return y.sin() + 1


@torch.autocast("cpu", dtype=torch.bfloat16)
def in_low_precision(x):
    y = x @ x.T
    breaks()
    return (y @ y).float() + 1


def traced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Model:
    @traced
    @torch.no_grad()
    def method(self, x):
        y = x * 2
        breaks()
        return y.cos() + 1

    @torch.enable_grad()
    def with_gradients(self, x):
        y = x * 2
        breaks()
        return y.cos() + 1


def calls_functions(x):
    return without_gradients(x) + x, in_low_precision(x), torch.is_grad_enabled()


def calls_methods(x):
    model = Model()
    with torch.no_grad():
        y = model.with_gradients(x)
    return model.method(x) + x, y, y.requires_grad


class Counted:
    """A backend that keeps the names of what the graphs call."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, inputs, **options):
        self.graphs.append({str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes})
        return gm.forward

    def calls(self, name):
        return sum(name in graph for graph in self.graphs)


@pytest.mark.parametrize("program", [calls_functions, calls_methods])
def test_decorated_code_behind_a_break_is_in_graphs(program) -> None:
    def arguments():
        return (torch.randn(3, 4, requires_grad=True),)

    counted = Counted()
    check_same(program, arguments, backend=counted, fullgraph=False)
    assert counted.calls("sin") + counted.calls("cos") == (1 if program is calls_functions else 2)
    assert all(graph - {"output"} != {"_set_grad_enabled"} for graph in counted.graphs)


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, max_iter=4),
    "lbfgs with line search": lambda p: optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


def train(compile_step, make):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer, seen = make(model.parameters()), []
    optimizer.register_step_post_hook(lambda *given: seen.append(torch.is_grad_enabled()))

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean().sqrt()
            loss.backward()
            seen.append(torch.is_grad_enabled())
            return loss

        return optimizer.step(closure)

    step = compile_step(step)
    losses = [step(x).detach() for _ in range(4)]
    return losses, copy.deepcopy(model.state_dict()), optimizer.state_dict()["state"], seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_closure_runs_the_closure_and_the_step_in_graphs(name) -> None:
    counted = Counted()
    plain = train(lambda step: step, OPTIMIZERS[name])
    found = train(lambda step: gradsplit.compile(step, backend=counted), OPTIMIZERS[name])
    torch.testing.assert_close(found[:2], plain[:2], rtol=0, atol=0)
    assert str(found[2:]) == str(plain[2:])
    # Once more where gradients exist already, and where LBFGS calls the closure after the graph of its first call has
    # ended; the step has its state from the second call on.
    assert counted.calls("linear") == (3 if name == "lbfgs" else 2)
    assert counted.calls("add_" if name == "sgd" else "addcdiv_") == (0 if "lbfgs" in name else 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_and_closures_run_where_torch_compile_has_marked_the_steps(name) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    test_a_step_with_a_closure_runs_the_closure_and_the_step_in_graphs(name)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    @traced
    def scaled(self, x, *, by=1):
        y = x * self.factor * by
        breaks()
        return y + 1

    @classmethod
    @traced
    def doubled(cls, x):
        y = x * 2
        breaks()
        return y * 2

    @traced
    def parts(self, x):
        yield x * self.factor
        breaks()
        yield x * 3


def of_two_objects(x):
    one, other = Scaled(2), Scaled(5)
    total = one.scaled(x) + other.scaled(x, by=3) + Scaled.doubled(x) + sum(other.parts(x))
    one.factor += 1
    return total + one.scaled(x)


@torch.no_grad()
def recurs(x, n):
    breaks()
    return x if n == 0 else recurs(x * 2, n - 1) + 1


@torch.no_grad()
def raises(x):
    y = x * 2
    breaks()
    if y.sum() > -1e9:
        raise ValueError("too large")
    return y


def catches(x):
    try:
        return raises(x)
    except ValueError as error:
        return x * 3, torch.is_grad_enabled(), str(error), recurs(x, 4) + x


@pytest.mark.parametrize("program", [of_two_objects, catches])
def test_decorated_callees_that_break_equal_plain_ones(program) -> None:
    check_same(program, lambda: (torch.randn(3, requires_grad=True),), fullgraph=False, calls=3)
