"""Ranks that disagree, or fail where others wait for them. Run by ``test_disagreement.py``, all cases in one start.

Each case is a function that every rank runs, over a process group of its own; what it raised, and after how many
seconds, is written to the folder that is the argument, a file for each rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.options import CompileOptions
from gradsplit.distributed import CompiledDDP, DDPOptions
from gradsplit.distributed.agreement.agreement import agreement_of
from tests.multi_process.faults import Faults

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AGREEMENT_TIMEOUT_S = 3.0
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> None:
    CASES[function.__name__] = function


class Net(torch.nn.Module):
    """Two layers, used in one order or the other: the same parameters, whose gradients become ready differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.swapped = self.is_interrupted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.swapped:
            return self.first(self.second(x).relu())
        return self.second(self.first(x).relu())


def make_ddp(**ddp_options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **ddp_options)


def compiled(
    ddp: DistributedDataParallel, faults: Faults | None = None, dynamic: bool | None = False
) -> CompiledDDP:
    request = CompileRequest((faults or Faults()).backend, CompileOptions(), False, dynamic)
    return CompiledDDP(ddp, request, DDPOptions(agreement_timeout_s=AGREEMENT_TIMEOUT_S))


def step(model: Any, rows: int = 2, columns: int = 8, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(rows + RANK)
    model(torch.randn(rows, columns, generator=generator, dtype=dtype)).square().sum().backward()


def fail() -> None:
    raise gradsplit.InternalError("a fault on this rank")


def interrupt() -> None:
    raise KeyboardInterrupt


@case
def does_not_come() -> None:
    if RANK == 0:
        step(compiled(make_ddp()))
    else:
        make_ddp()


@case
def a_hook_on_one_rank() -> None:
    """Stock DDP would add up other buckets than the other rank."""
    model = compiled(make_ddp())
    step(model)
    if RANK == 1:
        model.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    step(model)


@case
def compilation_fails() -> None:
    faults = Faults()
    model = compiled(make_ddp(), faults)
    if RANK == 1:
        faults.happens = fail
    step(model)


@case
def later_models_after_a_failure() -> None:
    """No rank was in a collective, so the process group is as good as before."""
    faults = Faults()
    if RANK == 1:
        faults.happens = fail
    for _ in range(2):
        with suppress(gradsplit.CompileError, gradsplit.InternalError):
            step(compiled(make_ddp(), faults))
            raise AssertionError("the compilation failed on rank 1")
    check_equal_to_stock(compiled(make_ddp()), [2, 2])


@case
def later_compilation_fails() -> None:
    """Rank 1 fails at a size that only it has, and rank 0 is in an all-reduce."""
    faults = Faults()
    model = compiled(make_ddp(), faults)
    step(model)
    if RANK == 1:
        faults.happens = fail
    step(model, rows=2 + RANK)


@case
def compilation_is_interrupted() -> None:
    faults = Faults()
    model = compiled(make_ddp(), faults)
    step(model)
    if RANK == 1:
        faults.happens = interrupt
    step(model, rows=2 + RANK)


@case
def process_ends_in_a_forward() -> None:
    """Rank 0 is in an all-reduce by then."""
    ddp = make_ddp()
    model = compiled(ddp)
    step(model)
    ddp.module.is_interrupted = RANK == 1
    try:
        step(model)
    except KeyboardInterrupt:
        agreement_of(dist.group.WORLD).watch.close()
        raise


@case
def interrupts_that_the_program_handles() -> None:
    """It goes on, if only to save and to evaluate."""
    ddp = make_ddp()
    model = compiled(ddp)
    step(model)
    ddp.module.is_interrupted = True
    with suppress(KeyboardInterrupt):
        step(model)
    ddp.module.is_interrupted = False
    with torch.no_grad():
        model(torch.ones(2, 8))
    check_equal_to_stock(model, [2, 2])
    agreement_of(dist.group.WORLD).watch.close()
    check_equal_to_stock(model, [2])


@case
def failure_is_known_before_the_backward() -> None:
    """On a GPU the backward would start collectives of a group that was aborted."""
    model = compiled(make_ddp())
    step(model)
    result = model(torch.ones(2, 8))
    watch = agreement_of(dist.group.WORLD).watch
    if RANK == 1:
        watch.announce("rank 1 gave up")
        raise KeyboardInterrupt
    while not watch.failure:
        with suppress(gradsplit.CompileError):
            watch.check_failures()
    assert model.buckets is not None
    model.buckets.averaging.start = lambda flat: fail()  # type: ignore[method-assign]
    result.sum().backward()


@case
def first_call_raises() -> None:
    """An error of the program, on one rank."""
    step(compiled(make_ddp()), columns=8 - RANK)


@case
def slow_rank_is_waited_for() -> None:
    faults = Faults()
    if RANK == 1:
        faults.happens = lambda: time.sleep(0.3)
    check_equal_to_stock(compiled(make_ddp(), faults), [2, 2])


@case
def another_size_on_one_rank() -> None:
    """Rank 0 waits in an all-reduce for longer than it takes to look for failures."""
    faults = Faults()
    model = compiled(make_ddp(), faults)
    check_equal_to_stock(model, [2])
    if RANK == 1:
        faults.happens = lambda: time.sleep(0.7)
    check_equal_to_stock(model, [2 + RANK, 2])


def check_equal_to_stock(model: CompiledDDP, batches: list[int]) -> None:
    stock = make_ddp()
    model.ddp.zero_grad()
    for rows in batches:
        for one in (stock, model):
            step(one, rows)
    assert model.buckets is not None
    for name, parameter in stock.module.named_parameters():
        found = model.buckets.parameters[name].grad
        assert found is not None and parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad)


@case
def process_dies_while_it_compiles() -> None:
    """The last case, since rank 1 is gone then."""
    faults, ddp = Faults(), make_ddp()
    model = compiled(ddp, faults)
    step(model)
    if RANK == 1:
        faults.happens = lambda: os._exit(0)
    ddp.module.swapped = True
    step(model)


def main(folder: Path) -> None:
    logging.getLogger("gradsplit").setLevel(logging.CRITICAL)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD_SIZE, is_master=RANK == 0
    )
    # What the first compilation of a process imports takes ranks that share processors unequally long.
    step(gradsplit.compile(Net(), backend="aot_eager"))
    outcomes: dict[str, tuple[str, float]] = {}
    # A group of gloo's that is let go waits for collectives in which the other rank will not take part.
    groups = []
    for name, run in CASES.items():
        prefixed = PrefixStore(name, store)
        dist.init_process_group(
            "gloo", store=prefixed, rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
        )
        groups.append(dist.group.WORLD)
        start_s, error = time.monotonic(), ""
        try:
            run()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        outcomes[name] = (error, time.monotonic() - start_s)
        (folder / f"rank_{RANK}.json").write_text(json.dumps(outcomes))
        if name == list(CASES)[-1]:
            os._exit(0)
        dist.destroy_process_group()
        store.set(f"{name}/{RANK}", "done")
        store.wait([f"{name}/{rank}" for rank in range(WORLD_SIZE)], timedelta(seconds=60))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
