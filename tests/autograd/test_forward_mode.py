"""Tangents of forward mode flow through compiled functions: their kernels would lose them, so such calls are plain."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer


def _tangent(f, x, w):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)), w)).tangent


def at_the_first_call(compile):
    return _tangent(compile(layer), torch.randn(3, 3), torch.randn(3, 3))


def after_plain_calls(compile):
    f, x, w = compile(layer), torch.randn(3, 3), torch.randn(3, 3)
    return f(x, w), _tangent(f, x, w), f(x, w)


def no_product_in_it(compile):
    f, x, w = compile(lambda x, w: (x * w).sin()), torch.randn(3), torch.randn(3)
    f(x, w)
    return _tangent(f, x, w)


def without_gradients(compile):
    f, x, w = compile(lambda x, w: (x * w).sin()), torch.randn(3), torch.randn(3, requires_grad=True)
    with torch.no_grad():
        f(x, w)
        return _tangent(f, x, w)


def with_gradients(compile):
    f, x, w = compile(layer), torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    f(x, w)
    return _tangent(f, x, w)


def function_transforms(compile):
    f, x = compile(lambda x: x.sin()), torch.randn(3)
    f(x)
    return (
        torch.func.jvp(f, (x,), (torch.ones(3),)),
        torch.func.vmap(f)(torch.randn(2, 3)),
        torch.func.jacrev(f)(x),
        torch.func.hessian(lambda x: f(x).sum())(x),
    )


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        at_the_first_call,
        after_plain_calls,
        no_product_in_it,
        without_gradients,
        with_gradients,
        function_transforms,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_forward_mode(scenario, backend):
    check_scenario(scenario, backend)
