"""Slices of module lists are new modules with the same children."""

from __future__ import annotations

import torch
from torch import nn

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


def compile_eager(function):
    return CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.used = 3

    def forward(self, x):
        for layer in self.layers[: self.used]:
            x = layer(x)
        return self.chain[1:](x) * len(self.layers[1:3])


def test_loop_over_a_slice():
    module = Layers()
    compiled = compile_eager(module)
    x = torch.randn(3, 2)
    for _ in range(2):
        assert torch.equal(compiled(x), module(x))
    assert len(compiled.entries) == 1
    assert "p_layers_0_weight" in str(compiled.entries[0].captured.graph)
    module.used = 2
    assert torch.equal(compiled(x), module(x))


def test_a_slice_that_is_returned_is_new():
    compiled = compile_eager(lambda module, x: (module.layers[1:], module.layers[1](x)))
    for module in (Layers(), Layers()):
        part, _ = compiled(module, torch.ones(2))
        assert type(part) is nn.ModuleList and list(part) == list(module.layers)[1:]
        assert part is not compiled(module, torch.ones(2))[0]
    assert len(compiled.entries) == 1
