"""``torch.utils.checkpoint`` around compiled functions: the recomputation calls them again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf

without_reentry = functools.partial(checkpoint, use_reentrant=False)


def once(compile, run=without_reentry, program=layer):
    f, x, w = compile(program), leaf(3, 3), leaf(3, 3)
    y = run(f, x, w)
    y.sum().backward()
    return y, x.grad, w.grad


def reentrant(compile):
    return once(compile, functools.partial(checkpoint, use_reentrant=True))


def without_early_stop(compile):
    with set_checkpoint_early_stop(False):
        return once(compile)


def with_dropout(compile):
    return once(compile, program=lambda x, w: dropout(x @ w, 0.5))


def several_calls_in_one(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    gradients = []
    for _ in range(3):
        without_reentry(lambda x, w: f(x, w).sin() * f(x + 1, w), x, w).sum().backward()
        gradients.append((x.grad.clone(), w.grad.clone()))
    return gradients


def inside_of_one_another(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    without_reentry(lambda x: without_reentry(f, f(x, w).sin(), w) * f(x, w), x).sum().backward()
    return x.grad, w.grad


def compiled_before_and_after(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    f(x, w).sum().backward()
    without_reentry(f, x, w).sum().backward()
    f(x, w).sum().backward()
    return x.grad, w.grad


def stages_in_a_row(compile):
    stages = [compile(torch.nn.Linear(3, 3)) for _ in range(4)]
    x = leaf(2, 3)
    checkpoint_sequential(stages, 2, x, use_reentrant=False).sum().backward()
    return x.grad, [stage.weight.grad for stage in stages]


def selective(compile):
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    return once(compile, functools.partial(without_reentry, context_fn=contexts))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        once,
        reentrant,
        without_early_stop,
        with_dropout,
        several_calls_in_one,
        inside_of_one_another,
        compiled_before_and_after,
        stages_in_a_row,
        selective,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_checkpoint_around_a_call(scenario, backend):
    check_scenario(scenario, backend)
