"""A rank that is killed, stopped, raises, ends or is slow, at each stage of a step, and before the ranks first meet; or
that leaves a backward out: the others name it soon, or go on.

``python -m tests.multi_process.rank_failures`` tries all kinds at all stages on 2 and 4 gloo ranks, each also where
rank 0 is the one, which holds the store. With names of cases (``killed-forward-2-1``: kind, stage, ranks, which) it
tries those. ``DDP_CASES_DEVICE=cuda`` tries them over NCCL, on as many ranks as there are GPUs. Ranks are started here
and not by a launcher, which would end them all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.compile_core.compiled_calls import compiled_code
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.options import CompileOptions
from gradsplit.distributed import CompiledDDP, DDPOptions
from gradsplit.distributed.agreement import bulletin, ring
from gradsplit.distributed.agreement.failure_watch import LINGER_S
from tests.forked_ranks import ForkedRank, fork_rank
from tests.multi_process.ddp_harness import DEVICE, start_process_group
from tests.multi_process.faults import Faults
from tests.start_ranks import free_port

KINDS = ("killed", "stopped", "raises", "ends", "slow")
# The first three are before the ranks have met: before the module is compiled, after, and in a first call without
# gradients.
STAGES = ("wrapped", "called", "evaluation", "capture", "compile", "forward", "backward", "step")
# What a rank does that runs no backward in one step: it goes on, leaves its loop, and waits at a barrier.
SKIPS = ("goes_on", "goes_on_buffers", "leaves", "destroys", "destroys_slowly", "barrier")
STEPS, FAILING_STEP = 4, 2
NAMED_WITHIN_S = 30.0


@dataclass(frozen=True)
class Case:
    """What happens to one rank.

    Attributes:
        overlap: as in ``DDPOptions``.
        seconds: how long it is stopped or slow.
        alarm_s: how long a rank may say nothing.
    """

    kind: str
    stage: str
    size: int
    rank: int
    overlap: str = "in_graph"
    seconds: float = 20.0
    alarm_s: float = ring.ALARM_S

    def __str__(self) -> str:
        return f"{self.kind}-{self.stage}-{self.size}-{self.rank}-{self.overlap}-{self.seconds:g}-{self.alarm_s:g}"

    @staticmethod
    def of(name: str) -> Case:
        kind, stage, size, rank, *rest = name.split("-")
        overlap, seconds, alarm_s = [*rest, *("in_graph", "20", str(ring.ALARM_S))[len(rest) :]]
        return Case(kind, stage, int(size), int(rank), overlap, float(seconds), float(alarm_s))


class Fault:
    """Happens once, where the case says, on the rank that it says."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self.armed = False

    def at(self, stage: str) -> None:
        case = self._case
        if not self.armed or case.stage != stage or dist.get_rank() != case.rank:
            return
        self.armed = False
        (self._folder / "begun").write_text(str(time.time()))
        if case.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.kind == "stopped":  # who has started the ranks continues it
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)
        elif case.kind == "slow":
            time.sleep(case.seconds)
        elif case.kind == "ends":
            sys.exit(0)
        else:
            raise ValueError("a fault of the program")

    def comes_late(self) -> None:
        """The last of four ranks gets to the others when they know of the fault."""
        if self._case.kind == "killed" and dist.get_rank() == 3:
            time.sleep(2 * LINGER_S)


class InForward(torch.autograd.Function):
    """Something that runs in a forward, and something in its backward."""

    fault: Fault

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        InForward.fault.at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        InForward.fault.at("backward")
        return gradient.clone()


@gradsplit.disable
def run_plainly(x: torch.Tensor) -> torch.Tensor:
    return InForward.apply(x)


class Net(torch.nn.Module):
    """Two graphs with plain Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norm: torch.nn.Module = torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(run_plainly(self.norm(self.first(x)).relu()))


def train(case: Case, folder: Path) -> None:
    """What each rank runs."""
    rank = int(os.environ["RANK"])
    ring.ALARM_S = bulletin.SILENCE_S = case.alarm_s
    fault = InForward.fault = Fault(case, folder)
    faults = Faults()
    faults.happens = lambda: fault.at("compile")
    torch.manual_seed(0)
    start_process_group()
    net = Net().to(DEVICE)
    if case.kind == "skips" and case.stage != "goes_on_buffers":
        net.norm = torch.nn.Identity()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    request = CompileRequest(faults.backend, CompileOptions(), False, False)
    fault.armed = case.stage in ("wrapped", "called", "evaluation")
    fault.at("wrapped")
    model = CompiledDDP(ddp, request, DDPOptions(overlap=case.overlap))
    time.sleep(1)
    fault.at("called")
    if case.stage == "evaluation":
        if rank == case.rank:
            faults.happens = lambda: fault.at("evaluation")
        with torch.no_grad():
            ddp.require_forward_param_sync = False  # as with stock DDP after a forward without gradients
            model(torch.ones(4 + rank, 8, device=DEVICE))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        # A first compilation happens in the first step, and later ones do where there is another size.
        fault.armed = step == (0 if case.stage in ("capture", "compile") else FAILING_STEP)
        if fault.armed and case.stage == "capture":
            install_capture_fault(fault)
        optimizer.zero_grad()
        loss = model(torch.ones(4 + rank, 8, device=DEVICE)).square().sum()
        if case.kind == "skips" and step == FAILING_STEP and rank == case.rank:
            (folder / "begun").write_text(str(time.time()))
            if case.stage.startswith("goes_on"):
                continue
            break
        loss.backward()
        fault.at("step")
        optimizer.step()
    if case.kind == "skips" and rank == case.rank:
        if case.stage == "barrier":
            dist.barrier()
        if not case.stage.startswith("destroys"):
            return
        if case.stage == "destroys_slowly":  # as NCCL's, which waits for the others
            dist.ProcessGroup.shutdown = lambda group: time.sleep(60)  # type: ignore[method-assign]
        dist.destroy_process_group()
        time.sleep(60)
        return
    (folder / f"went_on_{rank}").write_text(str(time.time()))
    dist.barrier()
    dist.destroy_process_group()


def install_capture_fault(fault: Fault) -> None:
    """The next capture of a frame meets the fault."""
    capture = compiled_code.capture

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        fault.at("capture")
        fault.comes_late()
        return capture(*arguments, **keywords)

    compiled_code.capture = faulty


def run(case: Case, limit_s: float = 90.0) -> str:
    """Starts the ranks of a case; what is wrong with what became of them, or ""."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        ranks = [_start(case, rank, port, folder) for rank in range(case.size)]
        try:
            return _judge(case, ranks, folder, limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _start(case: Case, rank: int, port: str, folder: Path) -> ForkedRank:
    program = ["-m", "tests.multi_process.rank_failures", "--train", str(folder), str(case)]
    return fork_rank(program, rank, case.size, port, folder / f"said_{rank}")


def _judge(case: Case, ranks: Sequence[ForkedRank], folder: Path, limit_s: float) -> str:
    begun = folder / "begun"

    def has_begun() -> bool:  # the file is there before what is written to it
        return begun.exists() and bool(begun.read_text())

    _wait(has_begun, limit_s, ranks)
    if not has_begun():
        return "the fault did not come: " + _said(folder, range(case.size))
    begun_s = float(begun.read_text())
    if case.kind == "stopped":
        threading.Timer(
            begun_s + case.seconds - time.time(), ranks[case.rank].send_signal, [signal.SIGCONT]
        ).start()
    others = [rank for rank in range(case.size) if rank != case.rank]
    within_s = NAMED_WITHIN_S + (case.seconds if case.kind == "slow" else 0)
    if DEVICE == "cuda" and case.stage == "wrapped":
        # No connection tells that a rank has ended which has not said yet that it is there.
        within_s += DDPOptions().agreement_timeout_s
    ended_s: dict[int, float] = {}

    def have_ended() -> bool:
        for rank in others:
            if rank not in ended_s and ranks[rank].poll() is not None:
                ended_s[rank] = time.time() - begun_s
        return len(ended_s) == len(others)

    _wait(have_ended, within_s + 15)
    wrong = []
    for rank in others:
        said = (folder / f"said_{rank}").read_text()
        if (folder / f"went_on_{rank}").exists():
            continue
        if rank not in ended_s:
            wrong.append(f"rank {rank} hangs: {_said(folder, [rank])}")
        elif case.kind == "slow":
            wrong.append(f"rank {rank} ended: {_said(folder, [rank])}")
        elif f"rank {case.rank}" not in said or ended_s[rank] > within_s:
            wrong.append(f"rank {rank} ended after {ended_s[rank]:.0f} s: {_said(folder, [rank])}")
        elif any(f"CompileError: rank {other} " in said for other in others) and case.kind != "skips":
            wrong.append(f"rank {rank} names another rank: {_said(folder, [rank])}")
    took = max(ended_s.values(), default=0.0)
    went_on = all((folder / f"went_on_{rank}").exists() for rank in others)
    if not wrong:
        print(f"{case}: {'went on' if went_on else 'named'} after {took:.1f} s", flush=True)
        for rank in () if went_on else others:
            print(f"    rank {rank}: {_last_error(_said(folder, [rank]))}", flush=True)
    return "\n".join(wrong)


def _said(folder: Path, ranks: Sequence[int]) -> str:
    return "\n".join((folder / f"said_{rank}").read_text()[-3000:] for rank in ranks)


def _last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if "rank" in line and "File" not in line]
    return lines[-1] if lines else said[-200:]


def _wait(is_done: Any, seconds: float, ranks: Sequence[ForkedRank] = ()) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        if ranks and all(process.poll() is not None for process in ranks):
            return
        time.sleep(0.05)


def _seconds(kind: str, stage: str) -> float:
    if kind != "slow":
        return 20.0
    # Who does not compile has agreement_timeout_s to come to the first call.
    return 40.0 if stage in ("wrapped", "called") else 90.0


def all_cases() -> list[Case]:
    """Every kind at every stage, on 2 and 4 ranks, where rank 0 is the one and where another is."""
    sizes = [size for size in (2, 4) if DEVICE == "cpu" or size <= torch.cuda.device_count()]
    return [
        Case(kind, stage, size, rank, seconds=_seconds(kind, stage))
        for size in sizes
        for kind in KINDS
        for stage in STAGES
        for rank in ((0, 1) if size == 2 else (0, 2))
    ] + [
        Case("skips", stage, size, rank)
        for size in sizes
        for stage in SKIPS
        for rank in ((0, 1) if size == 2 else (0, 2))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--train", type=Path, help="run as one of the ranks")
    arguments = parser.parse_args()
    cases = [Case.of(name) for name in arguments.cases]
    if arguments.train is not None:
        train(cases[0], arguments.train)
        return
    are_wrong = False
    for case in cases or all_cases():
        if message := run(case):
            are_wrong = True
            print(f"{case} is wrong: {message}", flush=True)
    sys.exit(are_wrong)


if __name__ == "__main__":
    main()
