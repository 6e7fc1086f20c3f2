"""Hooks of modules: run in the graph and guarded, or left to Python where they belong to the backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registry

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.capture.same_module import check_module


def hooked(register):
    def build():
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        register(module[0])
        return module

    return build


FORWARD = {
    "hook": lambda m: m.register_forward_hook(lambda module, args, result: result + 1),
    "hook with keywords": lambda m: m.register_forward_hook(
        lambda module, args, kwargs, result: result * (2 + len(kwargs)), with_kwargs=True
    ),
    "hook that returns nothing": lambda m: m.register_forward_hook(lambda module, args, result: None),
    "hook that always runs": lambda m: m.register_forward_hook(
        lambda module, args, result: result - args[0], always_call=True
    ),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: args[0] * 2),
    "pre-hook with a tuple": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "pre-hook with keywords": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    ),
}


@pytest.mark.parametrize("register", FORWARD.values(), ids=FORWARD.keys())
def test_forward_hooks(register):
    check_module(hooked(register))


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
        lambda m: m.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,)),
    ],
)
def test_backward_hooks_are_left_to_python(register):
    check_module(
        hooked(register),
        make_arguments=lambda: (torch.randn(3, 4, requires_grad=True),),
        fullgraph=False,
        captures=None,
    )
    with pytest.raises(Unsupported, match="backward hooks"):
        gradsplit.compile(hooked(register)(), backend="eager", fullgraph=True)(torch.randn(3, 4))


def test_hooks_on_all_modules_are_guarded():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = gradsplit.compile(lambda x: module(x), backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), module(x))
    for amount in (1, 2):
        handles = [
            registry.register_module_forward_hook(lambda m, args, result, n=amount: result + n),
            registry.register_module_forward_pre_hook(lambda m, args: None),
        ]
        assert torch.equal(compiled(x), module(x))
        for handle in handles:
            handle.remove()
    assert torch.equal(compiled(x), module(x))


def test_a_forward_that_raises_past_a_hook_that_always_runs():
    seen = []

    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    inner = Raises()
    inner.register_forward_hook(lambda module, args, result: seen.append(1), always_call=True)

    def run(x):
        try:
            return inner(x)
        except ValueError:
            return x + 1

    compiled = gradsplit.compile(run, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [1]
