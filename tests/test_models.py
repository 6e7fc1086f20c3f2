"""Modules of torch, whole, on the default backend: results, gradients, buffers and random state equal plain torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsplit


class Residual(nn.Module):
    """A convolutional block as in a ResNet, with in-place operators and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.second_norm = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(3, 8, 1, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        y = self.second_norm(self.second(y))
        y += self.shortcut(x)
        y = F.max_pool2d(F.relu(y), 2)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


def encoder_layer(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True, activation="gelu")


def text_classifier() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 3), nn.LogSoftmax(-1))


IMAGES = torch.Size((4, 3, 8, 8))
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[torch.Size]]] = {
    "residual": (Residual, [IMAGES]),
    "residual_channels_last": (lambda: Residual().to(memory_format=torch.channels_last), [IMAGES]),
    "encoder_layer": (lambda: encoder_layer(0.0), [torch.Size((2, 5, 16))]),
    "encoder_layer_dropout": (lambda: encoder_layer(0.3), [torch.Size((2, 5, 16))]),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), [torch.Size((2, 5, 8))] * 3),
    "lstm": (lambda: nn.LSTM(4, 6, batch_first=True), [torch.Size((2, 5, 4))]),
    "gru_cell": (lambda: nn.GRUCell(4, 6), [torch.Size((2, 4)), torch.Size((2, 6))]),
    "text_classifier": (text_classifier, []),
}


def run(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Everything that a training step of the model determines."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(3)
    outputs = [out for out in torch.utils._pytree.tree_leaves(model(*inputs)) if isinstance(out, Tensor)]
    model.zero_grad()
    weights = [torch.linspace(0.1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    seen = {f"output {k}": out.detach() for k, out in enumerate(outputs)}
    seen |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    seen |= {f"gradient of input {k}": x.grad for k, x in enumerate(inputs) if x.requires_grad}
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return seen | {"random state": torch.get_rng_state()}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_equals_plain_torchs(name: str) -> None:
    make, shapes = MODELS[name]
    plain = make().double()
    options = {"fallback_random": True}
    compiled = gradsplit.compile(copy.deepcopy(plain), fullgraph=True, options=options)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes] or [torch.randint(0, 10, (3, 4))]
    for _ in range(2):
        expected, found = run(plain, inputs), run(compiled, inputs)
        assert expected.keys() == found.keys()
        for what, value in expected.items():
            torch.testing.assert_close(
                found[what], value, rtol=1e-9, atol=1e-9, msg=lambda m, w=what: f"{w}: {m}"
            )
            assert found[what].stride() == value.stride() or "gradient" in what, what
    assert len(compiled._run.entries) == 1


@pytest.mark.parametrize("hidden_given", [False, True])
def test_lstms_of_onednn_keep_what_their_backward_needs(hidden_given: bool) -> None:
    """Which it only does for float32 and where gradients are enabled: not so inside a compiled forward."""
    plain = nn.LSTM(4, 6, num_layers=2, batch_first=True)
    compiled = gradsplit.compile(copy.deepcopy(plain), fullgraph=True, backend="aot_eager")
    inputs: list[Any] = [torch.randn(2, 5, 4)]
    if hidden_given:
        inputs.append((torch.randn(2, 2, 6, requires_grad=True), torch.randn(2, 2, 6, requires_grad=True)))
    gradients = []
    for model in (plain, compiled):
        outputs = torch.utils._pytree.tree_leaves(model(*inputs))
        wanted = [*model.parameters(), *(inputs[1] if hidden_given else ())]
        gradients.append(torch.autograd.grad(sum(out.square().sum() for out in outputs), wanted))
    assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        assert torch.equal(plain(*inputs)[0], compiled(*inputs)[0])
