"""What stands between a backward and the next forward: clipping, scaling, optimizers."""

from __future__ import annotations

import torch
from torch import nn

from tests.multi_process.ddp_harness import case, data, pair


@case()
def clipping_and_adamw() -> None:
    stock, compiled = pair()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (stock, compiled)]
    for step in range(3):
        for model, optimizer in zip((stock, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        # AdamW divides by the root of squares: rounding of tiny gradients shows in full.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
