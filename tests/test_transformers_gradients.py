"""Models of transformers in float32: the default backend's gradients are as near to float64's as eager's are.

Both errors are those of all gradients together, each relative to its parameter's true gradient. Dropout is off: what is
compared is arithmetic.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.transformers_models import MODELS


def make(name: str) -> nn.Module:
    """A model without dropout, and without normalisations that shrink what passes through them to nothing."""
    torch.manual_seed(0)
    module = MODELS[name].make().train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(part, name, 0.0)
    return module


def gradients(module: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    module(**inputs).loss.backward()
    return [parameter.grad.double() for parameter in module.parameters() if parameter.grad is not None]


def error(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """The root of the mean square of the relative errors; a gradient that is zero counts with nothing."""
    errors = [
        ((one - other).norm() / other.norm()).item()
        for one, other in zip(found, true, strict=True)
        if other.norm() > 1e-12
    ]
    return math.sqrt(sum(value * value for value in errors) / len(errors))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_float64_as_eagers(name, device):
    plain = make(name).to(device)
    inputs = {key: value.to(device) for key, value in MODELS[name].inputs(4).items()}
    exact = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    true = gradients(copy.deepcopy(plain).double(), exact)
    compiled = gradsplit.compile(copy.deepcopy(plain), fullgraph=True)
    found = error(gradients(compiled, inputs), true)
    eager = error(gradients(plain, inputs), true)
    assert found <= 2 * eager, f"{found:.2e} is {found / eager:.2f} times eager's error"
