"""The default backend on a GPU: generated Triton kernels beside eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsplit
from examples.gpt import GPT, GPTConfig
from gradsplit.compile_core.autograd.captured_graphs.grouped_heads import takes_groups


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_gpt_gradients_are_as_good_as_eagers(autocast: bool) -> None:
    config = GPTConfig(layers=2)
    torch.manual_seed(0)
    model = GPT(config).cuda()
    compiled = gradsplit.compile(model, fullgraph=True)
    tokens, targets = torch.randint(0, config.vocabulary, (2, 8, config.context), device="cuda")

    def gradients(run: torch.nn.Module, enabled: bool) -> list[torch.Tensor]:
        run.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            loss = run(tokens, targets)
        loss.backward()
        return [parameter.grad.double() for parameter in run.parameters()]

    found = gradients(compiled, autocast)
    eager = gradients(model, autocast)
    exact = gradients(model.double(), False)
    for (name, _), a, b, c in zip(model.named_parameters(), found, eager, exact, strict=True):
        ours, theirs = (a - c).norm(), (b - c).norm()
        assert ours <= 2 * theirs + 1e-6 * c.norm(), f"{name}: error {ours:.2e}, eager's {theirs:.2e}"


@pytest.mark.gpu
def test_repeated_heads_are_attended_in_groups() -> None:
    """As good as eager, with one key for several queries in the kernel."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (x[:, :, None].expand(2, 2, 4, 128, 64).reshape(2, 8, 128, 64) for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    torch.manual_seed(0)
    given = [torch.randn(2, heads, 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    compiled = gradsplit.compile(attend, fullgraph=True)

    def run(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        result = function(*leaves)
        weights = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape)
        (result * weights).sum().backward()
        return [result.double(), *(leaf.grad.double() for leaf in leaves)]

    exact = run(attend, torch.float64)
    for ours, theirs, c in zip(
        run(compiled, torch.bfloat16), run(attend, torch.bfloat16), exact, strict=True
    ):
        assert (ours - c).norm() <= 2 * (theirs - c).norm() + 1e-6 * c.norm()
    assert takes_groups(*given, 0.0, True)
