"""What programs that measure data-parallel steps share: ranks, models, and a clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.bench.ddp_sides import Inputs
from tests.bench.gpu_training import MODELS
from tests.bench.training_models import TRAININGS

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
    model, inputs = (MODELS if device_type == "cuda" else TRAININGS)[name]()
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


def step_ms(step: Callable[[], object], device: torch.device, in_a_row: int = 1) -> float:
    """One of some steps in a row that all ranks begin together; by CUDA events, where there are any.

    In training the host runs ahead of the GPU. A single step begins with an idle GPU and a host that was asleep, and
    shows how fast that wakes up.
    """
    begin_together(device)
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(in_a_row):
            step()
        return 1e3 * (time.perf_counter() - begin) / in_a_row
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(in_a_row):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / in_a_row


def begin_together(device: torch.device) -> None:
    dist.barrier()
    synchronise(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
