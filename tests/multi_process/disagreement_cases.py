"""Ranks that disagree before their first all-reduce; the case is the argument. Run by ``test_disagreement.py``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compile_core
from compile_core.backends.registry import RegionBackend, resolve_backend
from compile_core.options import CompileOptions
from compile_core.planners import CompileRequest
from distributed import DDPOptions, compile_ddp


class Net(torch.nn.Module):
    """Two layers, used in one order or the other: the same parameters, whose gradients become ready differently."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            return self.first(self.second(x).relu())
        return self.second(self.first(x).relu())


def main(case: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(swapped=case == "another_graph" and rank == 1)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    backend = resolve_backend("aot_eager")
    if case == "compilation_fails" and rank == 1:
        assert isinstance(backend, RegionBackend)
        backend = replace(backend, compile_region=fail)
    request = CompileRequest(backend, CompileOptions(), False)
    compiled = compile_ddp(ddp, request, DDPOptions(agreement_timeout_s=5))
    if case == "does_not_come" and rank == 1:
        time.sleep(30)
    try:
        compiled(torch.randn(2, 8)).sum().backward()
    except compile_core.CompileError as error:
        print(f"rank {rank} got: {error}", flush=True)
        # The other rank must report by itself too, before the launcher ends it.
        time.sleep(2)
        raise


def fail(*_: object) -> Any:
    raise compile_core.InternalError("a fault on this rank")


if __name__ == "__main__":
    main(sys.argv[1])
