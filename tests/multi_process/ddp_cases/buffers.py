"""Buffers are rank 0's before each forward."""

from __future__ import annotations

from torch import nn

from tests.multi_process.ddp_harness import Net, case, check_buffers, check_in_graph, pair, train


@case()
def buffers_are_broadcast() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled))
    check_in_graph(compiled)
    check_buffers(stock, compiled)
