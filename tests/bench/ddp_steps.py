"""What programs that measure data-parallel steps share: ranks, models, and rows that all ranks begin together."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from tests.bench.ddp_sides import Inputs, Running
from tests.bench.gpu_training import MODELS
from tests.bench.rows import LEAD_IN, Row, rows_in_turn, run_row, synchronise
from tests.bench.training_models import TRAININGS, two_types

_ON_CPU = {**TRAININGS, "two_types": two_types}
# In which the exposure of a plan is measured.
_TIMELINES = 5
# A rank that failed waits as long for the others to fail, too; they may hang in a collective that it left out.
_FAILURE_TIMEOUT = timedelta(seconds=120)


class Ranks:
    """What the ranks tell one another beside the measured collectives."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        group = dist.new_group(backend="gloo", timeout=_FAILURE_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def as_first(self, mine: Any) -> Any:
        """What the first rank has."""
        return self.gather(mine)[0]

    def barrier(self) -> None:
        dist.barrier(self._group)


@cache
def load_model(name: str, device_type: str) -> tuple[nn.Module, Inputs]:
    """The same weights and inputs on all ranks, on the CPU."""
    torch.manual_seed(0)
    model, inputs = (MODELS if device_type == "cuda" else _ON_CPU)[name]()
    assert isinstance(model, nn.Module)
    return model, inputs


def start_process_group() -> torch.device:
    """This process's device: a GPU of its own and NCCL, where there are enough; else the CPU and gloo."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def link_of(device: torch.device) -> str:
    """What gradients travel over."""
    if device.type == "cpu":
        return "gloo"
    direct = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
    return "sockets" if all(os.environ.get(name) == "1" for name in direct) else "direct"


def run_together(step: Callable[[], object], device: torch.device, length: int) -> Row:
    """A row that all ranks begin together."""
    begin_together(device)
    return run_row(step, device, length)


def slowest_rows(
    ranks: Ranks, runs: Mapping[str, Callable[[], Row]], warm_up_s: float, rows: int
) -> dict[str, list[Row]]:
    """Rows in turn. A row's time is the slowest rank's, as are its clock and its power the least and most."""
    found = rows_in_turn(runs, warm_up_s, rows, agree=ranks.as_first)
    return {
        name: [_slowest(row) for row in zip(*ranks.gather(mine), strict=True)] for name, mine in found.items()
    }


def exposed_ms(ranks: Ranks, running: Running, device: torch.device) -> float:
    """How long all-reduces run beside nothing, in a median backward of the rank on which that is longest; the host is
    ahead, as in a row."""
    found = []
    for _ in range(_TIMELINES):
        begin_together(device)
        for _ in range(LEAD_IN):
            running.step()
        with gradsplit.distributed.record_timeline(running.call) as recorder:
            running.step()
        found.append(recorder.timeline().exposed_ms)
    return max(ranks.gather(statistics.median(found)))


def _slowest(rows: Sequence[Row]) -> Row:
    return Row(
        max(row.step_ms for row in rows), min(row.sm_mhz for row in rows), max(row.watts for row in rows)
    )


def begin_together(device: torch.device) -> None:
    dist.barrier()
    synchronise(device)
