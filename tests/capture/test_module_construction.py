"""Modules made in the frame: losses and layers without parameters in the graph, others by a break."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.same_module import check_module

TARGET = torch.tensor([0, 1, 2])
LOSSES = {
    "mse": lambda y, x: nn.MSELoss()(y, x),
    "cross entropy": lambda y, x: nn.CrossEntropyLoss(label_smoothing=0.1)(y, TARGET),
    "weighted cross entropy": lambda y, x: nn.CrossEntropyLoss(weight=x[0].detach())(y, TARGET),
    "binary cross entropy": lambda y, x: nn.BCEWithLogitsLoss(reduction="sum")(y, x),
    "huber": lambda y, x: nn.HuberLoss()(y, x) + nn.SmoothL1Loss()(y, x) + nn.L1Loss()(y, x),
    "divergence": lambda y, x: nn.KLDivLoss(reduction="batchmean")(y, x.softmax(-1)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses(loss):
    check_module(lambda: nn.Linear(4, 4), lambda module, x: loss(module(x), x))


def test_layers_without_parameters():
    def run(module, x):
        layers = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.GELU(), nn.Softmax(dim=-1), nn.Flatten())
        return layers(module(x))

    check_module(lambda: nn.Linear(4, 4), run)


def test_layers_with_parameters_draw_the_same_numbers():
    check_module(
        lambda: nn.Linear(4, 4),
        lambda module, x: nn.Linear(4, 2)(module(x)),
        fullgraph=False,
        captures=None,
    )


def test_a_module_that_is_returned():
    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor
            self.register_buffer("offset", torch.ones(2))

        def forward(self, x):
            return x * self.factor + self.offset

    def make(x):
        made = Scale(3)
        return made, made(x)

    x = torch.randn(2)
    module, result = gradsplit.compile(make, backend="eager", fullgraph=True)(x)
    assert type(module) is Scale and module.training and dict(module.named_buffers()).keys() == {"offset"}
    assert torch.equal(module(x), result)
    assert repr(module) == repr(Scale(3))
    module.register_forward_hook(lambda m, args, y: -y)
    assert torch.equal(module(x), -result)
