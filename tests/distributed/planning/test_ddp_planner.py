"""What ranks that see other sizes must plan alike."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsplit.distributed.planning.ddp_planner import DDPPlanner
from tests.distributed.planning.recorded_backwards import recorded_graph

SHAPES = {**{f"w{k}": (1024, 1024) for k in range(6)}, "table": (65536, 1024)}


def layers(
    w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor, w5: Tensor, table: Tensor, places: Tensor
) -> Tensor:
    rows = F.embedding(places.long(), table)
    for weight in (w0, w1, w2, w3, w4, w5):
        rows = F.linear(rows, weight).relu()
    return rows


def planned(batch: int) -> tuple[list[str], str]:
    """The order in which a rank with such a batch completes gradients, and its first plan."""
    parameters = {
        name: torch.nn.Parameter(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()
    }
    ddp: Any = SimpleNamespace(bucket_bytes_cap=25 * 2**20, bucket_bytes_cap_default=True)
    buckets = SimpleNamespace(parameters=parameters, averaging=SimpleNamespace(factor=1.0), strides={})
    communicator: Any = SimpleNamespace(buckets=buckets)
    planner = DDPPlanner(ddp, communicator, nullcontext)
    graph = recorded_graph(layers, **SHAPES, places=(batch,))
    schedule, _ = planner.plan_backward(graph, [*parameters.values(), torch.empty(batch)])
    return list(schedule.destinations), str(planner.first_plan(planner.first_order()))


def test_the_first_plan_is_the_same_for_all_sizes() -> None:
    small, large = planned(16), planned(16384)
    assert small[0] != large[0], "what is worth waiting for depends on the size"
    assert small[1] == large[1]
