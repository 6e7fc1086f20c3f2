"""Backends and modes of compilation."""

from __future__ import annotations

import torch

from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    case,
    check_reducer,
    data,
    is_in_graph,
    pair,
    train,
)


@case()
def aot_eager_backend_is_bit_equal() -> None:
    stock, compiled = pair(backend="aot_eager")
    for model in (stock, compiled):
        model(data(0)).square().mean().backward()
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@case()
def inductor_backend_fills_the_buckets() -> None:
    stock, compiled = pair(backend="inductor", bucket_cap_mb=0.007)
    train((stock, compiled), steps=2)
    assert is_in_graph(compiled) and len(inspect_ddp(compiled).plan.buckets) > 1


@case()
def whole_graph_backend_keeps_the_reducer() -> None:
    stock, compiled = pair(backend="eager")
    train((stock, compiled))
    check_reducer(compiled, "whole graphs")
