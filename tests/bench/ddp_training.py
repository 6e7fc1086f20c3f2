"""Data-parallel training steps of three known models: stock DDP, eager and compiled, beside ours, in one table.

    python -m launch --nproc-per-node 2 tests/bench/ddp_training.py [--models gpt2,resnet50,bert] [--sides ...]

A step is forward and backward under bf16 autocast, float32 products at "high", gradients dropped before it. All ranks
begin five steps together, as in training the host runs ahead; figures are the slowest rank's: milliseconds a step by
CUDA events (median of such rows after warm-up), seconds of the first step, the peak of allocated memory over the
measured steps. Rounds repeat all sides, so that a machine whose speed drifts shows. All sides have the same weights and
inputs; the loss of the first step tells that they compute the same (dropout is off).

Each side has build caches of its own under ``--caches``: a first step is cold when they are new. ``--results`` gathers
lines of JSON: what a call did not get to, for its ``--time-limit-s``, the next one measures. The link is what NCCL is
told by its environment; NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo makes it sockets. Without GPUs
the small models of ``training_models`` run over gloo, which tests this program and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch._inductor.utils import clear_caches

import compile_core
import distributed
from bucketing import simulate
from tests.bench.ddp_results import Figures, append_figures, read_figures, summary, table
from tests.bench.ddp_sides import SIDES, Running
from tests.bench.ddp_steps import (
    Ranks,
    begin_together,
    link_of,
    load_model,
    start_process_group,
    step_ms,
    synchronise,
)

_TIMELINES = 5
_IN_A_ROW = 5


def main() -> None:
    arguments = _parse_arguments()
    device = start_process_group()
    torch.set_float32_matmul_precision("high")
    ranks = Ranks()
    begin = time.monotonic()
    longest_s: dict[str, float] = {}  # by side
    found = ranks.as_first(read_figures(arguments.results) if arguments.results else [])
    done = {figures.key for figures in found if not figures.failed}
    link = link_of(device)
    remark = ""
    wanted = [
        (round_number, name, side)
        for round_number in range(arguments.rounds)
        for side in arguments.sides.split(",")
        for name in arguments.models.split(",")
    ]
    for round_number, name, side in wanted:
        if (link, name, side, round_number) in done:
            continue
        started = time.monotonic()
        if ranks.as_first(started - begin + longest_s.get(side, 0.0) > arguments.time_limit_s):
            remark = "stopped before the time limit; call again with the same --results"
            break
        cold = _use_caches(ranks, arguments.caches / ("all" if arguments.share_caches else f"{name}/{side}"))
        start = Figures(link, name, side, round_number, cold=cold and not arguments.share_caches)
        figures = _agreed(ranks, start, partial(_measure, arguments, device))
        longest_s[side] = max(longest_s.get(side, 0.0), time.monotonic() - started)
        found.append(figures)
        if ranks.rank == 0:
            print(figures, flush=True)
            if arguments.results:
                append_figures(arguments.results, figures)
    if ranks.rank == 0:
        Console(width=150).print(table(found))
        for line in [*summary(found), remark]:
            print(line, flush=True)
    ranks.barrier()
    dist.destroy_process_group()


def _measure(arguments: argparse.Namespace, device: torch.device, start: Figures) -> Figures:
    """This rank's figures of one side."""
    torch._dynamo.reset()
    clear_caches()  # which hold paths of the last side's folder
    compile_core.reset()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    model, inputs = load_model(start.model, device.type)
    module = copy.deepcopy(model).to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    gradient_bytes = sum(p.numel() * p.itemsize for p in module.parameters() if p.requires_grad)
    with SIDES[start.side](module, inputs) as running:
        begin_together(device)
        begin = time.perf_counter()
        first = running.step()
        loss = float("nan") if first is None else first.item()
        synchronise(device)
        first_s = time.perf_counter() - begin
        for _ in range(arguments.warm_up):
            running.step()
        synchronise(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        rows = range(0, arguments.steps, _IN_A_ROW)
        median_ms = statistics.median(step_ms(running.step, device, _IN_A_ROW) for _ in rows)
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes if on_gpu else 0
        figures = dataclasses.replace(
            start,
            step_ms=median_ms,
            first_s=first_s,
            peak_gib=peak_bytes / 2**30,
            gradient_gib=gradient_bytes / 2**30,
            loss=loss,
        )
        return _with_plan(figures, running, device, gradient_bytes)


def _with_plan(figures: Figures, running: Running, device: torch.device, gradient_bytes: int) -> Figures:
    """With what can be said beside the times: of all-reduces the speed, of ours the buckets and what is not hidden."""
    if running.call is None:
        per_s = gradient_bytes / figures.step_ms * 1e-6
        bus = per_s * 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        return dataclasses.replace(figures, note=f"{per_s:.2f} GB/s, on the bus {bus:.2f} GB/s")
    try:
        runner = distributed.inspect_ddp(running.call)
    except TypeError:
        return figures
    if runner.plan is None:
        return dataclasses.replace(figures, note=f"reducer: {runner.reason_for_reducer}")
    exposed_ms = []
    for _ in range(_TIMELINES):
        begin_together(device)
        with distributed.record_timeline(running.call) as recorder:
            running.step()
        exposed_ms.append(recorder.timeline().exposed_ms)
    return dataclasses.replace(
        figures,
        buckets=len(runner.plan.buckets),
        exposed_ms=statistics.median(exposed_ms),
        predicted_ms=None if runner.costs is None else simulate(runner.plan, runner.costs).exposed_ms,
    )


def _agreed(ranks: Ranks, start: Figures, measure: Callable[[Figures], Figures]) -> Figures:
    """The figures of all ranks in one. A side that fails on every rank is noted and left.

    Raises:
        RuntimeError: it failed on some ranks only; nobody knows what the others' collectives wait for.
    """
    try:
        mine = measure(start)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        print(f"rank {ranks.rank}: {start.model} {start.side}: {note[:2000]}", flush=True)
        mine = dataclasses.replace(start, failed=True, note=note[:2000])
    everyone: list[Figures] = ranks.gather(mine)
    failed = [rank for rank, other in enumerate(everyone) if other.failed]
    if failed and len(failed) < len(everyone):
        raise RuntimeError(f"{start.side} failed on rank {failed} only: {everyone[failed[0]].note}")
    if failed:
        return everyone[0]
    exposed = [other.exposed_ms for other in everyone if other.exposed_ms is not None]
    return dataclasses.replace(
        max(everyone, key=lambda other: other.step_ms),
        first_s=max(other.first_s for other in everyone),
        peak_gib=max(other.peak_gib for other in everyone),
        loss=everyone[0].loss,
        exposed_ms=max(exposed, default=None),
    )


def _use_caches(ranks: Ranks, folder: Path) -> bool:
    """Everybody's build caches inside this folder; gives whether it is new."""
    cold = ranks.as_first(not folder.exists())
    for variable, name in (
        ("GRADSPLIT_CACHE", "gradsplit"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        os.environ[variable] = str(folder / name)
    ranks.barrier()  # nobody makes the folder before it was looked for
    return cold


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--steps", type=int, default=30, help="measured ones")
    parser.add_argument("--warm-up", type=int, default=12, help="steps after the first; plans settle in them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="begin nothing after it")
    parser.add_argument("--results", type=Path, help="file of figures, read and added to")
    parser.add_argument("--caches", type=Path, default=Path("out/ddp_training_caches"))
    parser.add_argument(
        "--share-caches", action="store_true", help="one cache for all: quick, but no side is cold then"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
