"""Many gradients in one backward (``is_grads_batched``): compiled kernels cannot take them, torch's do."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad
from torch.autograd.functional import jacobian, vjp

from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf, two_results


def a_batch(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    return grad(f(x, w), [x, w], torch.randn(5, 3, 3), is_grads_batched=True)


def for_one_of_two_results(compile):
    f, x, w = compile(two_results), leaf(3), leaf(3)
    first, _ = f(x, w)
    return grad(first, [x, w], torch.randn(5, 3), is_grads_batched=True)


def in_another_layout(compile):
    f, x, w = compile(layer), leaf(3, 4), leaf(4, 2)
    y = f(x, w)
    arriving = torch.randn(2, 5, 3).permute(1, 2, 0)
    return grad(y, [x, w], arriving, is_grads_batched=True)


def into_a_view_of_the_result(compile):
    f, x = compile(lambda x: (x.t() * 2).reshape(2, 6).sin()), leaf(3, 4)
    return grad(f(x), x, torch.randn(6, 2, 5).permute(2, 1, 0), is_grads_batched=True)


def batched_and_not(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)
    one = grad(y, x, torch.ones(3, 3), retain_graph=True)
    many = grad(y, x, torch.randn(2, 3, 3), is_grads_batched=True, retain_graph=True)
    return one, many, grad(y, w, torch.ones(3, 3))


def jacobians(compile):
    f, x, w = compile(layer), leaf(2, 2), leaf(2, 2)
    return jacobian(f, (x, w)), jacobian(f, (x, w), vectorize=True), vjp(f, (x, w), torch.ones(2, 2))


def gradients_under_vmap(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)
    return torch.func.vmap(lambda g: grad(y, [x, w], g, retain_graph=True))(torch.randn(5, 3, 3))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        a_batch,
        for_one_of_two_results,
        in_another_layout,
        into_a_view_of_the_result,
        batched_and_not,
        jacobians,
        gradients_under_vmap,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_batched_gradients(scenario, backend):
    check_scenario(scenario, backend)
