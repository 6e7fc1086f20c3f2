"""Parametrised modules: their classes are made at run time and compute a parameter when it is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.capture.same_module import check_module


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric():
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def old_style(register):
    def build():
        with pytest.warns(FutureWarning):
            return register(nn.Linear(4, 4))

    return build


BUILDERS = {
    "own": symmetric,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral norm in eval": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "weight norm by hook": old_style(nn.utils.weight_norm),
    "spectral norm by hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_same_as_plain(build):
    check_module(build, captures=None)


def test_removed_parametrization_is_noticed():
    module = symmetric()

    def step(m, x):
        return m(x)

    check_module(lambda: module, step)
    parametrize.remove_parametrizations(module, "weight")
    assert isinstance(module.weight, nn.Parameter)
    check_module(lambda: module, step)


def test_cached_parameters():
    def run(module, x):
        with parametrize.cached():
            return module(x) + module(x)

    check_module(symmetric, run, fullgraph=False, captures=None)
    torch.manual_seed(0)
