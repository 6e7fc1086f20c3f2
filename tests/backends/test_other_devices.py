"""Programs on devices without kernels of ours run with torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsplit


def on_meta(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    noise = F.dropout(a, 0.5) + torch.rand_like(a)
    return (
        (noise @ b).softmax(1).t(),
        a[:1],
        F.cross_entropy(a, torch.zeros(3, dtype=torch.long, device="meta")),
    )


def on_both(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    small = [torch.zeros(size, device="meta") + size for size in (3, 5)]
    return a.exp(), b.sum(), b.detach().sin().to("meta").exp(), *small


def described(function: Callable[..., Any], device: str) -> list[Any]:
    a, b = (torch.ones(size, device=device, requires_grad=True) for size in ((3, 4), (4, 5)))
    results = function(a, b)
    learnt = [result for result in results if result.requires_grad]
    gradients = torch.autograd.grad(learnt, [a, b], [torch.ones_like(result) for result in learnt])
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (*results, *gradients)]


@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
@pytest.mark.parametrize(("program", "device"), [(on_meta, "meta"), (on_both, "cpu")])
def test_programs_on_the_meta_device(program: Callable[..., Any], device: str, backend: str) -> None:
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    assert described(compiled, device) == described(program, device)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        result = gradsplit.compile(model)(torch.empty(5, 4))
    result.sum().backward()
    assert (result.shape, result.device.type) == ((5, 2), "meta")
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
