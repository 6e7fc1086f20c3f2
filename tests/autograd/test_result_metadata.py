"""What a program can see of a compiled call's results besides their values, and what changes in place do to them."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, leaf, outcome, two_results


def seen_of(tensor):
    return (
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad_fn is None,
        tensor._is_view(),
        tensor._version,
        tensor.is_inference(),
        type(tensor),
    )


def many_kinds(x, w):
    return x * w, x.detach() * 2, x, x.view(-1), (x * w).detach(), x.argmax(), x.t()


def with_gradients(compile):
    f, x, w = compile(many_kinds), leaf(2, 2), leaf(2, 2)
    results = f(x, w)
    return list(map(seen_of, results)), results[2] is x


def without_gradients(compile):
    f, x, w = compile(many_kinds), torch.randn(2, 2), torch.randn(2, 2)
    results = f(x, w)
    return list(map(seen_of, results)), results[2] is x


def under_no_grad(compile):
    f, x, w = compile(many_kinds), leaf(2, 2), leaf(2, 2)
    with torch.no_grad():
        results = f(x, w)
    return list(map(seen_of, results)), results[2] is x


def under_inference_mode(compile):
    f, x, w = compile(lambda x, w: (x * w, x.argmax())), leaf(2, 2), leaf(2, 2)
    with torch.inference_mode():
        results = f(x, w)
    return [
        (result.requires_grad, result.is_leaf, result.is_inference(), result._is_view()) for result in results
    ]


def from_views_without_gradients(compile):
    """They require gradients where the tensor does that an input is a view of, which a leaf may be."""

    def program(x):
        with torch.no_grad():
            rows = x[:2]
        return (rows * 3).sum()

    f, part = compile(program), torch.randn(6, 2)[:4]
    inputs = [leaf(4, 2), part.clone()[:].requires_grad_(), leaf(6, 2)[:4], part.clone()[:].requires_grad_()]
    return [seen_of(f(x)) for x in [*inputs, torch.randn(3, 2)[:].requires_grad_()]]


def views_with_gradients_inside_of_no_grad(compile):
    """The program switches gradients on where its caller, or the frame before a break, has switched them off."""

    @compile
    def program(x, w):
        with torch.enable_grad():
            return x.view(-1), x[:1], w.t()

    @compile
    def broken(x, w):
        with torch.no_grad():
            torch._C._get_tracing_state()  # a call without rule
            with torch.enable_grad():
                y = x.expand(2, 2, 2)
        return x.view(-1), y.nansum(), w

    found = []
    for call in (program, broken):
        x, w = leaf(2, 2), leaf(2, 2)
        with torch.no_grad():
            results = program(x, w) if call is program else ()
        results = results or broken(x, w)
        (results[1].sum() * 3).backward()
        found += [x.grad, w.grad, *map(seen_of, results)]
    return found


def views_after_a_break_inside_of_no_grad(compile):
    """The rest of the frame switches gradients on again, so that its view may be changed."""

    @compile
    def program(x):
        with torch.no_grad():
            torch._C._get_tracing_state()  # a call without rule
        return x.t()

    turned, factor = program(torch.ones(2, 2)), leaf(2, 2)
    turned.mul_(factor).sum().backward()
    return factor.grad, seen_of(turned)


def origins(compile):
    f, x, w = compile(lambda x, w: x * w), leaf(2, 2), leaf(2, 2)
    y = f(x, w)  # torch 2.11 keeps the node of a Function with its results only
    nodes = [node for node, _ in y.grad_fn.next_functions if node is not None]
    return {type(node).__name__ for node in nodes}, {id(node.variable) == id(x) for node in nodes}


def kept_gradients(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, second = f(x, w)
    first.retain_grad()
    (first * second).sum().backward()
    return first.grad, x.grad, first.retains_grad, second.retains_grad


def same_result_twice(compile):
    def program(x):
        y = x.sin()
        return y, y

    f, x = compile(program), leaf(3)
    first, second = f(x)
    (first + 2 * second).sum().backward()
    return first is second, x.grad


def detached(compile):
    f, x = compile(lambda x: x.sin()), leaf(3)
    y = f(x)
    y.detach().zero_()
    y.sum().backward()
    z = f(x).detach_()
    return y, x.grad, z.requires_grad, z.is_leaf


def in_the_memory_of(x):
    y = x * 2
    twice, apart = y.detach(), y.detach()
    return x, y, x.detach(), x.detach()[0], x.view(-1), x.data, y.data, twice, twice[1], apart[0], y[1]


def detached_in_the_program(compile):
    """A change of one gives a history to those alone that autograd knows for views of it, and counts where it does."""
    found = []
    for requires_grad in (False, True):
        for changed in range(2, 11):
            f, x, w = compile(in_the_memory_of), torch.ones(2, 2), leaf(1)
            x = x.requires_grad_() * 1
            if not requires_grad:
                x = x.detach()
            results = f(x)
            results[changed].add_(w)
            seen = [(one.requires_grad, one._version, one) for one in results]
            loss = sum(one.sum() for one in results)
            found.append((x.requires_grad, x._version, seen, torch.autograd.grad(loss, w)))
    return found


def changed_in_place(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, _ = f(x, w)
    first.mul_(2).add_(w)
    first.sum().backward()
    return first, x.grad, w.grad


def changed_without_gradients(compile):
    f, x = compile(lambda x: (x * 2, x.view(-1))), torch.randn(2, 2)
    doubled, view = f(x)
    doubled.add_(1)
    view.mul_(3)
    return doubled, view, x, x._version


def view_of_an_activation_changed(compile):
    f, x = compile(lambda x: (x.view(-1), x[0], x.sin())), leaf(2, 2)
    hidden = x * 2
    flat, row, _ = f(hidden)
    flat.mul_(3)
    row.add_(1)
    (hidden.square().sum() + flat.sum()).backward()
    return hidden, flat, row, x.grad


def view_of_a_leaf_changed(compile):
    f, x = compile(lambda x: x.view(-1)), leaf(2, 2)
    return outcome(lambda: f(x).mul_(3))


def input_changed_by_the_program(compile):
    def program(x, counts):
        counts.add_(1)
        counts.mul_(2)
        return x * 2

    f, x, counts = compile(program), leaf(3), torch.zeros(3)
    before = counts._version
    y = f(x, counts)
    return counts, counts._version > before, seen_of(y), x._version


def expanded(compile):
    f, x = compile(lambda x: (x * 2).expand(4, 3)), leaf(1, 3)
    y = f(x)
    y.sum().backward()
    return y.stride(), x.grad


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        with_gradients,
        without_gradients,
        under_no_grad,
        under_inference_mode,
        from_views_without_gradients,
        views_with_gradients_inside_of_no_grad,
        views_after_a_break_inside_of_no_grad,
        origins,
        kept_gradients,
        same_result_twice,
        detached,
        detached_in_the_program,
        changed_in_place,
        changed_without_gradients,
        view_of_an_activation_changed,
        view_of_a_leaf_changed,
        input_changed_by_the_program,
        expanded,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_results(scenario, backend):
    check_scenario(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_results_name_what_made_them(backend):
    compiled = gradsplit.compile(two_results, backend=backend, fullgraph=True)
    first, second = compiled(leaf(3), leaf(3))
    assert first.grad_fn is second.grad_fn
    assert first.grad_fn.name() == "CompiledCallBackward"


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_takes_no_autograd(backend, mode, monkeypatch):
    compiled = gradsplit.compile(two_results, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    x, w, trained = torch.randn(3), torch.randn(3), leaf(3)
    assert compiled(x, w)[0].grad_fn is None
    with mode():
        assert not compiled(trained, w)[0].requires_grad


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_view_made_without_gradients_gathers_its_own(backend):
    def program(x):
        with torch.no_grad():
            torch._C._get_tracing_state()  # a call without rule
            row = x[:1]
        row.requires_grad_()
        return row

    row = gradsplit.compile(program, backend=backend)(torch.ones(2, 2))
    (row.sum() * 3).backward()
    assert row.is_leaf and row.grad.tolist() == [[3.0, 3.0]]
