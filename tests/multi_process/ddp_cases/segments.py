"""Backwards in several regions, with work that waits: planned for a machine as slow as the models are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gradsplit.bucketing import LinkModel
from gradsplit.distributed import inspect_ddp
from gradsplit.distributed.planning import plan_segments
from gradsplit.distributed.planning.backward_costs import Rates
from gradsplit.distributed.planning.plan_segments import Machine
from tests.multi_process.ddp_harness import case, check_steps, data, loss_of, pair

_SLOW = Machine(Rates(1e6, 1e6, 1e7, 0.0), (LinkModel(1e-4, 1 / 4e5), LinkModel(1e-3, 1 / 1e4)), 1e-4)


class Language(nn.Module):
    """Layers between a table of words and a head, which may be one matrix."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 512, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((100 * x.abs()).long() % 512)
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return self.head(self.norm(rows))


@contextmanager
def slow_machine() -> Iterator[None]:
    known = plan_segments.CPU, plan_segments.GPU
    plan_segments.CPU = plan_segments.GPU = _SLOW
    try:
        yield
    finally:
        plan_segments.CPU, plan_segments.GPU = known


def regions(compiled: nn.Module) -> list[tuple[str, ...]]:
    """The gradients that each region of the only backward completes."""
    (graph,) = inspect_ddp(compiled).graphs
    assert graph.backward is not None
    return [tuple(compute.destinations.values()) for compute in graph.backward.schedule.computes]


@case()
def large_and_ready_last() -> None:
    """Gradients of layers wait behind that of the table."""
    for tied in (False, True):
        with slow_machine():
            stock, compiled = pair(lambda tied=tied: Language(tied))
            check_steps(stock, compiled, exact=False)
        found = regions(compiled)
        assert len(found) >= 3
        assert "table.weight" not in found[-1] and "layers.0.weight" in found[-1], found


@case("cpu")
def regions_with_torchs_kernels() -> None:
    with slow_machine():
        stock, compiled = pair(lambda: Language(tied=True), backend="aot_eager")
        check_steps(stock, compiled)
    assert len(regions(compiled)) >= 3


@case()
def regions_after_no_sync() -> None:
    with slow_machine():
        stock, compiled = pair(lambda: Language(tied=True))

        def run(model: nn.Module, step: int) -> None:
            with model.no_sync():  # type: ignore[operator]
                loss_of(model(data(2 * step))).backward()
            loss_of(model(data(2 * step + 1))).backward()

        check_steps(stock, compiled, run, exact=False)
    assert len(regions(compiled)) >= 3
