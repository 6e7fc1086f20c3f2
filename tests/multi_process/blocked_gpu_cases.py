"""A rank whose GPU waits in NCCL for one that failed. Run by ``test_disagreement.py``, a start of ranks for each case;
with ``copies`` behind its name, gradients are added up by copy engines.

Each rank prints what became of it, and after how many seconds of the step that matters.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.options import CompileOptions
from gradsplit.distributed import CompiledDDP, DDPOptions
from tests.multi_process.disagreement_cases import Net, fail
from tests.multi_process.faults import Faults

RANK = int(os.environ["RANK"])
AGREEMENT_TIMEOUT_S = 4.0
# A compilation that is longer than a communicator's patience.
SLOW_S, IMPATIENT_S = 7.0, 3.0


def step(model: CompiledDDP, rows: int = 4) -> float:
    model(torch.ones(rows, 8, device="cuda")).square().sum().backward()
    # The host waits for the GPU, and that for the other rank.
    return sum(gradient.sum().item() for gradient in gradients(model))


def gradients(model: CompiledDDP) -> list[torch.Tensor]:
    assert model.buckets is not None
    return [p.grad for p in model.buckets.parameters.values() if p.grad is not None]


def later_compilation_fails(model: CompiledDDP, net: Net, faults: Faults) -> None:
    if RANK == 1:
        faults.happens = fail
    step(model, rows=4 + RANK)


def another_branch_later(model: CompiledDDP, net: Net, faults: Faults) -> None:
    net.swapped = RANK == 1
    step(model)


def process_dies_while_it_compiles(model: CompiledDDP, net: Net, faults: Faults) -> None:
    if RANK == 1:
        faults.happens = lambda: os._exit(0)
    step(model, rows=4 + RANK)


def slow_compilation(model: CompiledDDP, net: Net, faults: Faults) -> None:
    """In the first step, for longer than a collective may take."""
    if RANK == 0:
        faults.happens = lambda: time.sleep(SLOW_S / 2)  # forward and backward
    step(model)
    faults.happens = lambda: None


def one_backward_fewer(model: CompiledDDP, net: Net, faults: Faults) -> None:
    _set_pg_timeout(timedelta(seconds=IMPATIENT_S), dist.group.WORLD)
    if RANK == 0:
        step(model)
    else:
        time.sleep(3 * IMPATIENT_S)


CASES: dict[str, Callable[[CompiledDDP, Net, Faults], None]] = {
    "later_compilation_fails": later_compilation_fails,
    "another_branch_later": another_branch_later,
    "process_dies_while_it_compiles": process_dies_while_it_compiles,
    "slow_compilation": slow_compilation,
    "one_backward_fewer": one_backward_fewer,
}


def main(case: str, *how: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    net, faults = Net().to(device), Faults()
    ddp = DistributedDataParallel(net, device_ids=[device.index])
    request = CompileRequest(faults.backend, CompileOptions(), False, False)
    is_slow = case == "slow_compilation"
    options = DDPOptions(
        agreement_timeout_s=60 if is_slow else AGREEMENT_TIMEOUT_S, copy_engines="copies" in how
    )
    model = CompiledDDP(ddp, request, options)
    if not is_slow:
        step(model)
    else:
        _set_pg_timeout(timedelta(seconds=IMPATIENT_S), dist.group.WORLD)
    start_s, outcome = time.monotonic(), "went on"
    try:
        CASES[case](model, net, faults)
        step(model)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    print(f"rank {RANK} after {time.monotonic() - start_s:.1f} s: {outcome}".replace("\n", " "), flush=True)
    if outcome == "went on":
        dist.destroy_process_group()
        return
    # The launcher ends the others when one ends; each is to speak for itself here.
    time.sleep(5)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
