"""Models of transformers: one graph each in training mode, equal to eager in values, gradients and state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from compile_core import api
from compile_core.compiled_function import CompiledFunction
from tests.capture.transformers_models import MODELS, Inputs


def compile_module(module: nn.Module) -> tuple[Any, CompiledFunction]:
    compiled = api.compile(module, backend="eager", fullgraph=True)
    return compiled, compiled._run


def leaves(value: Any) -> list[Any]:
    """Types, keys and tensors of a result, all the way down."""
    if isinstance(value, dict):
        return [type(value), *itertools.chain(*([key, *leaves(item)] for key, item in value.items()))]
    if isinstance(value, (list, tuple)):
        return [type(value), *itertools.chain(*map(leaves, value))]
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return [value]
    return [
        type(value),
        *itertools.chain(*([key, *leaves(item)] for key, item in sorted(vars(value).items()))),
    ]


def train_once(module: nn.Module, inputs: Inputs, seed: int) -> list[Any]:
    """A forward and backward; everything that they give."""
    module.zero_grad()
    torch.manual_seed(seed)
    output = module(**inputs)
    assert isinstance(output, ModelOutput)
    output["loss"].backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return leaves([output, gradients, dict(module.named_buffers()), torch.get_rng_state()])


def assert_same(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
            assert torch.equal(one, other)
        else:
            assert one is other or one == other


def same_as_eager(module: nn.Module, batches: list[Inputs]) -> CompiledFunction:
    compiled, function = compile_module(copy.deepcopy(module))
    for seed, inputs in enumerate(batches):
        want = train_once(module, copy.deepcopy(inputs), seed)
        assert_same(train_once(compiled, copy.deepcopy(inputs), seed), want)
    return function


@pytest.mark.parametrize("name", MODELS)
def test_training_is_one_graph(name):
    torch.manual_seed(0)
    model = MODELS[name]
    function = same_as_eager(model.make().train(), [model.inputs(batch) for batch in (2, 2, 3)])
    assert len(function.entries) <= 2  # one for each batch size, at most
    assert function.entries[-1].captured.graph is not None
