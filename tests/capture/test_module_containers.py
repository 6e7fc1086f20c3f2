"""Containers of modules and parameters, and walks over what a module holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capture.same_module import check_module


def three_layers():
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


def table():
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})


def sequence():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def parameter_list():
    return nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])


def parameter_table():
    return nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})


def tied():
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    return module


PROGRAMS = {
    "list": (three_layers, lambda m, x: [layer(x) for layer in m] + [m[-1](x), m[0:2][1](x), len(m)]),
    "list backwards": (three_layers, lambda m, x: [layer(x) for layer in reversed(m)]),
    "list membership": (three_layers, lambda m, x: (m[1] in m, x + 1)),
    "list enumerated": (three_layers, lambda m, x: [layer(x) * k for k, layer in enumerate(m)]),
    "dictionary": (table, lambda m, x: [m[key](x) for key in m] + [layer(x) for layer in m.values()]),
    "dictionary questions": (table, lambda m, x: ("a" in m, "z" in m, len(m), list(m.keys()), x + 1)),
    "dictionary items": (table, lambda m, x: [(key, layer(x)) for key, layer in m.items()][1][1]),
    "sequence slices": (sequence, lambda m, x: m[:2](x) + m[1:](x) + m[-1](x)),
    "parameters in a list": (parameter_list, lambda m, x: sum(x * p for p in m) + m[0] + m[-1] + len(m)),
    "parameters in a dictionary": (
        parameter_table,
        lambda m, x: x * m["a"] + sum(p for _, p in m.items()) + ("a" in m) + len(m),
    ),
    "all parameters": (tied, lambda m, x: [p.sum() * x for p in m.parameters()]),
    "parameters with names": (tied, lambda m, x: [x, *[name for name, _ in m.named_parameters()]]),
    "tied parameters twice": (
        tied,
        lambda m, x: [x, *[name for name, _ in m.named_parameters(remove_duplicate=False)]],
    ),
    "children": (sequence, lambda m, x: [x, *[type(child).__name__ for child in m.children()]]),
    "modules with names": (tied, lambda m, x: [x, *[name for name, _ in m.named_modules()]]),
    "a submodule by its path": (sequence, lambda m, x: m.get_submodule("0")(x) + m.get_parameter("2.bias")),
    "penalty": (sequence, lambda m, x: m(x).sum() + sum(p.square().sum() for p in m.parameters())),
    "questions": (
        sequence,
        lambda m, x: (hasattr(m, "nope"), hasattr(m[0], "weight"), getattr(m[0], "nope", 3), m(x)),
    ),
}


@pytest.mark.parametrize(("build", "run"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_same_as_plain(build, run):
    check_module(build, run)


def test_a_module_appended_in_the_frame_stays():
    def run(m, x):
        m.append(nn.ReLU())
        return m(x)

    check_module(sequence, run, captures=3)


class PlainContainers(nn.Module):
    """Modules in places where no table knows them, and one in two places."""

    def __init__(self):
        super().__init__()
        self.steps = [nn.Linear(4, 4), nn.ReLU()]
        self.named = {"a": nn.Tanh()}
        self.shared = nn.Linear(4, 4)
        self.again = self.shared

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.again(self.named["a"](self.shared(x)))


def test_modules_in_lists_and_dictionaries():
    check_module(PlainContainers)
