"""Random numbers of ranks and of the two kinds of generators."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsplit
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    data,
    pair,
)


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.second(self.norm(self.first(x)))), 0.5)
        return torch.nn.functional.dropout(self.third(hidden), 0.5)


@case()
def fallback_random_draws_what_stock_ddp_draws() -> None:
    stock, plain = (pair(Dropping)[0] for _ in range(2))
    compiled = gradsplit.compile(plain, options={"fallback_random": True})
    for step in range(2):
        for model in (stock, compiled):
            torch.manual_seed(10 * step + dist.get_rank())
            model.zero_grad()
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)
    check_in_graph(compiled)


@case()
def ranks_drop_what_their_own_seeds_say() -> None:
    """The gradient of the last bias is the mean of the ranks' masks, which differ."""
    compiled = pair(Dropping)[1]
    torch.manual_seed(dist.get_rank())
    y = compiled(data(0))
    y.sum().backward()
    masks = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, (y.detach() != 0).to(y.dtype))
    assert not torch.equal(masks[0], masks[1])
    check_close(compiled.module.third.bias.grad, 2 * torch.stack(masks).mean(0).sum(0))
    check_in_graph(compiled)
