"""The default backend on a GPU: generated Triton kernels beside eager and float64."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from examples.gpt import GPT, GPTConfig


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
