"""Operators of the program's own with backwards that look at data."""

from __future__ import annotations

import torch
from torch import nn

from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import case, check_in_graph, pair, train
from tests.programs.grouped_products import Experts


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = Experts(width=16).eval()
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort(stable=True)
        ends = torch.nn.functional.one_hot(chosen, 3).sum(0).cumsum(0)
        weight = self.router(x).softmax(-1).max(-1, keepdim=True).values[order]
        return self.last(self.experts(x[order], ends) * weight)


@case()
def a_backward_that_looks_at_data() -> None:
    stock, compiled = pair(Routed, "aot_eager", fullgraph=True)
    train((stock, compiled), exact=True)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def a_backward_that_looks_at_data_and_recordings() -> None:
    stock, compiled = pair(Routed, mode="reduce-overhead")
    train((stock, compiled))
    check_in_graph(compiled)
