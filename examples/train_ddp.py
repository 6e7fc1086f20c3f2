"""Trains a small GPT data-parallel, eager and compiled side by side, and shows what compiling gained.

    python -m gradsplit.launch --nproc-per-node 2 examples/train_ddp.py

Both models start equal and see equal batches. Their steps alternate, so that whatever else the machine does meets
both. Rank 0 prints a table and writes to ``--out``: ``report.json`` with every figure, ``overlap.png`` and
``trace.json`` with one measured backward (the latter opens in Perfetto), and ``kernels/`` with what each stage of the
compiler made.

Each process takes a GPU of its own and NCCL where there are enough GPUs, else the CPU and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text_data import batch, load_tokens
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.bucketing import Timeline, plot_timeline

LEARNING_RATE = 5e-4
# Compiling, allocating and clock ramps happen in the first steps; medians leave them out.
WARM_UP_STEPS = 5


@dataclass
class Trainer:
    """One of the two models in training, with what was measured of it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step_ms: list[float]
    losses: list[float]


def main() -> None:
    options = parse_arguments()
    device = start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out = Path(options.out)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)

    tokens = load_tokens()
    config = GPTConfig()

    def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch(tokens, step, rank, world_size, options.batch_size, config.context)
        return inputs.to(device), targets.to(device)

    eager = make_trainer(config, device, options.bucket_mb, lambda ddp: ddp)
    trace_folder = out / "kernels" if rank == 0 else None
    compiled = make_trainer(
        config,
        device,
        options.bucket_mb,
        lambda ddp: gradsplit.compile(ddp, options={"trace_folder": trace_folder}),
    )
    difference = gradient_difference(eager.model, compiled.model, batch_of(0))
    with make_progress(rank) as progress:
        task = progress.add_task("training", total=options.steps, loss=float("nan"))
        for step in range(options.steps):
            for trainer in (eager, compiled):
                train_step(trainer, batch_of(step), device)
            progress.update(task, advance=1, loss=compiled.losses[-1])
    # Once more where training ended: gradients are small there, and rounding shows.
    compiled.model.load_state_dict(eager.model.state_dict())
    difference = max(difference, gradient_difference(eager.model, compiled.model, batch_of(options.steps)))

    timeline = measure_overlap(compiled.model, batch_of(0))
    if rank == 0:
        tokens_per_step = world_size * options.batch_size * config.context
        report = make_report(eager, compiled, difference, timeline, tokens_per_step)
        report |= {"device": str(device.type), "processes": world_size}
        write_results(out, report, timeline)
        # A file has no width of its own; the default of 80 would fold every line of the buckets.
        console = Console() if Console().is_terminal else Console(width=120)
        console.print(make_table(report))
    # Together: a rank that ended while gloo's threads still held tensors of its last all-reduces would be aborted.
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--batch-size", type=positive, default=8, help="sequences a process and step")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="size of a gradient bucket in MiB")
    parser.add_argument("--out", default="out", help="folder for the results")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def start_process_group() -> torch.device:
    """This process's device, with the process group that fits it."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def make_trainer(
    config: GPTConfig,
    device: torch.device,
    bucket_mb: float,
    wrap: Callable[[DistributedDataParallel], torch.nn.Module],
) -> Trainer:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT(config).to(device), bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, fused=True)
    return Trainer(wrap(ddp), optimizer, [], [])


def train_step(trainer: Trainer, data: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> None:
    dist.barrier()
    start_s = now_s(device)
    trainer.optimizer.zero_grad()
    loss = trainer.model(*data)
    loss.backward()
    trainer.optimizer.step()
    trainer.step_ms.append(1e3 * (now_s(device) - start_s))
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    trainer.losses.append(mean.item())


def now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def gradient_difference(
    eager: torch.nn.Module, compiled: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """The largest ``|compiled - eager| / |eager|`` (2-norms) of any parameter's gradient, at equal parameters."""
    for model in (eager, compiled):
        model.zero_grad()
        model(*data).backward()
    worst = 0.0
    for (name, expected), found in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        if expected.grad is None or found.grad is None:
            raise RuntimeError(f"parameter {name} has no gradient")
        error = (found.grad.double() - expected.grad.double()).norm() / expected.grad.double().norm()
        worst = max(worst, error.item())
    return worst


def measure_overlap(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> Timeline:
    model.zero_grad()
    dist.barrier()
    with gradsplit.distributed.record_timeline(model) as recorder:
        model(*data).backward()
    return recorder.timeline()


def make_report(
    eager: Trainer, compiled: Trainer, difference: float, timeline: Timeline, tokens_per_step: int
) -> dict[str, Any]:
    runner = gradsplit.distributed.inspect_ddp(compiled.model)
    if runner.plan is None:
        raise RuntimeError(f"gradients were not reduced inside the backward: {runner.reason_for_reducer}")
    segments = [
        len(graph.backward.schedule.computes) for graph in runner.graphs if graph.backward is not None
    ]
    eager_ms, compiled_ms = (median_ms(trainer) for trainer in (eager, compiled))
    return {
        "eager_step_ms": eager_ms,
        "compiled_step_ms": compiled_ms,
        "eager_tokens_per_s": 1e3 * tokens_per_step / eager_ms,
        "compiled_tokens_per_s": 1e3 * tokens_per_step / compiled_ms,
        "eager_losses": eager.losses,
        "compiled_losses": compiled.losses,
        "max_grad_rel_diff": difference,
        "graphs": len(runner.graphs),
        "segments": max(segments),
        "buckets": [
            {"bytes": bucket.bytes, "parameters": [parameter.name for parameter in bucket.parameters]}
            for bucket in runner.plan.buckets
        ],
        "overlap_ms": timeline.overlap_ms,
        "all_reduce_ms": timeline.all_reduce_ms,
        "backward_compute_ms": timeline.compute_ms,
    }


def median_ms(trainer: Trainer) -> float:
    measured = trainer.step_ms[WARM_UP_STEPS:] or trainer.step_ms
    return statistics.median(measured)


def write_results(out: Path, report: dict[str, Any], timeline: Timeline) -> None:
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    timeline.write_chrome_trace(out / "trace.json")
    plot_timeline(timeline, out / "overlap.png")


def make_progress(rank: int) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, disable=rank != 0)


def make_table(report: dict[str, Any]) -> Table:
    table = Table(title=f"eager and compiled DDP, {report['processes']} processes, {report['device']}")
    table.add_column("")
    table.add_column("eager DDP", justify="right")
    table.add_column("compiled DDP", justify="right", overflow="fold")
    table.add_row("median step", f"{report['eager_step_ms']:.1f} ms", f"{report['compiled_step_ms']:.1f} ms")
    speeds = (report["eager_tokens_per_s"], report["compiled_tokens_per_s"])
    table.add_row("tokens/s", *(f"{speed:,.0f}" for speed in speeds))
    table.add_row(
        "final loss (nats/byte)", f"{report['eager_losses'][-1]:.4f}", f"{report['compiled_losses'][-1]:.4f}"
    )
    table.add_row("largest relative gradient difference", "", f"{report['max_grad_rel_diff']:.1e}")
    table.add_row("graphs", "", str(report["graphs"]))
    table.add_row("backward segments", "", str(report["segments"]))
    table.add_row(
        "all-reduce under compute", "", f"{report['overlap_ms']:.1f} of {report['all_reduce_ms']:.1f} ms"
    )
    table.add_section()
    for index, bucket in enumerate(report["buckets"]):
        names = ", ".join(bucket["parameters"])
        table.add_row(f"bucket {index}: {bucket['bytes']:,} bytes", "", names)
    return table


if __name__ == "__main__":
    main()
