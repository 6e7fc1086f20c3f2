"""Data-parallel training steps of three known models: stock DDP, eager and compiled, beside ours, in one table.

    python -m gradsplit.launch --nproc-per-node 2 tests/bench/ddp_training.py [--models gpt2,resnet50] [--sides ...]

A step is forward and backward under bf16 autocast, float32 products at "high", gradients dropped before it. Sides that
are compared with one another live in one process and take turns in rows of steps, which all ranks begin together and in
which the host runs ahead, as in training; rows count once the GPUs have worked for so long that they are as hot and
slow as they stay. Figures are the slowest rank's: milliseconds a step by CUDA events (the median of rows, each the
median of its steps), seconds of the first step, the peak of allocated memory over some steps. All sides have the same
weights and inputs; the loss of the first step tells that they compute the same (dropout is off).

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch._inductor.utils import clear_caches

import gradsplit
from gradsplit.bucketing import simulate
from tests.bench.ddp_results import Figures, append_figures, read_figures, summary, table
from tests.bench.ddp_sides import COMPARED_WITH, SIDES, VARIANTS, Running, in_groups
from tests.bench.ddp_steps import (
    Ranks,
    begin_together,
    exposed_ms,
    link_of,
    load_model,
    run_together,
    slowest_rows,
    start_process_group,
)
from tests.bench.rows import Row, synchronise

_IN_A_ROW = 10
# Steps of a side before its memory is looked at: plans settle in them, libraries choose, graphs are recorded.
_SETTLING = 10
_STEPS_OF_PEAK = 3


def main() -> None:
    arguments = _parse_arguments()
    device = start_process_group()
    torch.set_float32_matmul_precision("high")
    ranks = Ranks()
    begin = time.monotonic()
    longest_s: dict[tuple[str, ...], float] = {}  # by sides
    found = ranks.as_first(read_figures(arguments.results) if arguments.results else [])
    done = {figures.key for figures in found if not figures.failed}
    link = link_of(device)
    remark = ""
    wanted = [
        (name, sides)
        for sides in in_groups(arguments.sides.split(","))
        for name in arguments.models.split(",")
    ]
    for name, sides in wanted:
        if all((link, name, side) in done for side in sides):
            continue
        started = time.monotonic()
        if ranks.as_first(started - begin + longest_s.get(sides, 0.0) > arguments.time_limit_s):
            remark = "stopped before the time limit; call again with the same --results"
            break
        for figures in _measure(arguments, device, ranks, [Figures(link, name, side) for side in sides]):
            found.append(figures)
            if ranks.rank == 0:
                print(figures, flush=True)
                if arguments.results:
                    append_figures(arguments.results, figures)
        longest_s[sides] = max(longest_s.get(sides, 0.0), time.monotonic() - started)
    if ranks.rank == 0:
        Console(width=170).print(table(found))
        for line in [*summary(found), remark]:
            print(line, flush=True)
    ranks.barrier()
    dist.destroy_process_group()


def _measure(
    arguments: argparse.Namespace, device: torch.device, ranks: Ranks, starts: Sequence[Figures]
) -> list[Figures]:
    """The figures of sides of one model that are compared with one another."""
    torch._dynamo.reset()
    gradsplit.reset()
    found: dict[str, Figures] = {}
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        for start in starts:
            folder = "all" if arguments.share_caches else f"{start.model}/{start.side}"
            cold = _use_caches(ranks, arguments.caches / folder) and not arguments.share_caches

            def prepare(start: Figures) -> Figures:
                if start.side in VARIANTS:
                    base, vary = VARIANTS[start.side]
                    varied = running[start.side] = vary(running[base])
                    return dataclasses.replace(start, loss=_first_steps(varied, device))
                running[start.side], figures = _prepare(stack, device, start)
                return figures

            found[start.side] = _agreed(ranks, dataclasses.replace(start, cold=cold), prepare)
        good = {side: running[side] for side, figures in found.items() if not figures.failed}
        runs = {
            side: partial(run_together, side_runs.step, device, _IN_A_ROW) for side, side_runs in good.items()
        }
        rows = slowest_rows(ranks, runs, arguments.warm_up_s, arguments.rows)
        for side, side_runs in good.items():
            compared = rows.get(COMPARED_WITH.get(side, ""))
            figures = _with_rows(found[side], rows[side], compared)
            found[side] = _with_plan(figures, side_runs, device, ranks)
    return [*found.values()]


def _prepare(stack: ExitStack, device: torch.device, start: Figures) -> tuple[Running, Figures]:
    """Sets a side up, with a copy of the model; with this rank's figures of its first steps and its memory."""
    clear_caches()  # which hold paths of the last side's folder
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    # With all that the sides before hold, as they rest meanwhile.
    before_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    model, inputs = load_model(start.model, device.type)
    module = copy.deepcopy(model).to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    gradient_bytes = sum(p.numel() * p.itemsize for p in module.parameters() if p.requires_grad)
    running = stack.enter_context(SIDES[start.side](module, inputs))
    begin_together(device)
    begin = time.perf_counter()
    loss = _first_steps(running, device, 1)
    first_s = time.perf_counter() - begin
    _first_steps(running, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    _first_steps(running, device, _STEPS_OF_PEAK)
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes + _shared_bytes(running) if on_gpu else 0
    figures = dataclasses.replace(
        start,
        first_s=first_s,
        peak_gib=peak_bytes / 2**30,
        gradient_gib=gradient_bytes / 2**30,
        loss=loss,
    )
    return running, figures


def _ours(running: Running) -> gradsplit.distributed.CompiledDDP | None:
    """What runs a side that is ours under DDP."""
    try:
        return gradsplit.distributed.inspect_ddp(running.call)
    except TypeError:
        return None


def _shared_bytes(running: Running) -> int:
    """Of buckets that lie outside of what torch's allocator counts."""
    runner = _ours(running)
    return 0 if runner is None or runner.buckets is None else runner.buckets.shared_bytes


def _first_steps(running: Running, device: torch.device, steps: int = _SETTLING) -> float:
    """The loss of the first."""
    first = running.step()
    for _ in range(steps - 1):
        running.step()
    synchronise(device)
    return float("nan") if first is None else first.item()


def _with_rows(figures: Figures, rows: Sequence[Row], compared: Sequence[Row] | None) -> Figures:
    ratio = ratio_spread = None
    if compared is not None:
        ratios = [row.step_ms / other.step_ms for row, other in zip(rows, compared, strict=True)]
        ratio = statistics.median(ratios)
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4)
            ratio_spread = (high - low) / 2
    return dataclasses.replace(
        figures,
        step_ms=statistics.median(row.step_ms for row in rows),
        sm_mhz=statistics.median(row.sm_mhz for row in rows),
        watts=statistics.median(row.watts for row in rows),
        ratio=ratio,
        ratio_spread=ratio_spread,
    )


def _with_plan(figures: Figures, running: Running, device: torch.device, ranks: Ranks) -> Figures:
    """With what can be said beside the times: of all-reduces the speed, of ours the buckets and what is not hidden."""
    if running.call is None:
        per_s = figures.gradient_gib * 2**30 / figures.step_ms * 1e-6
        bus = per_s * 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        return dataclasses.replace(figures, note=f"{per_s:.2f} GB/s, on the bus {bus:.2f} GB/s")
    runner = _ours(running)
    if runner is None:
        return figures
    if runner.plan is None:
        return dataclasses.replace(figures, note=f"reducer: {runner.reason_for_reducer}")
    return dataclasses.replace(
        figures,
        buckets=len(runner.plan.buckets),
        exposed_ms=exposed_ms(ranks, running, device),
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
    return dataclasses.replace(
        everyone[0],
        first_s=max(other.first_s for other in everyone),
        peak_gib=max(other.peak_gib for other in everyone),
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
    names = [*SIDES, *VARIANTS]
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--sides", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rows", type=int, default=10, help=f"measured ones, of {_IN_A_ROW} steps")
    parser.add_argument("--warm-up-s", type=float, default=1.5, help="of rows that do not count")
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="begin nothing after it")
    parser.add_argument("--results", type=Path, help="file of figures, read and added to")
    parser.add_argument("--caches", type=Path, default=Path("out/ddp_training_caches"))
    parser.add_argument(
        "--share-caches", action="store_true", help="one cache for all: quick, but no side is cold then"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
