"""Exports a small GPT as a pipeline in one process, and trains it in several, each with a stage of its own.

    python examples/pipeline_export.py
    python -m gradsplit.launch --nproc-per-node 2 examples/pipeline_export.py
    python -m gradsplit.launch --nproc-per-node 4 examples/pipeline_export.py

The first line writes ``out/pipeline_2`` and ``out/pipeline_4``; the others load them, without the model's source, and
run torch's 1F1B schedule with compiled stages. Rank 0 prints what a step should look like, the last rank the losses.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from text_data import batch, load_tokens
from torch.distributed.pipelining import Schedule1F1B

import gradsplit
from gradsplit.bucketing import StageCost, simulate_pipeline
from gradsplit.distributed.pipeline.torch_schedules import torch_schedule

MICROBATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="out", help="folder of the exported pipelines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--backend", default=None, help="of gradsplit.compile; generated kernels by default")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        train(Path(options.out), options.steps, options.microbatches, options.backend)
    else:
        export(Path(options.out))


def export(out: Path) -> None:
    torch.manual_seed(0)
    config = GPTConfig(tied=True)
    tokens = torch.zeros(MICROBATCH, config.context, dtype=torch.long)
    for stages in (2, 4):
        folder = out / f"pipeline_{stages}"
        layout = gradsplit.distributed.export_pipeline(GPT(config), (tokens,), stages, folder=folder)
        mean = sum(stage.seconds for stage in layout.stages) / stages
        shares = ", ".join(f"{stage.seconds / mean:.2f}" for stage in layout.stages)
        print(f"{folder}: {stages} stages, which take {shares} of their mean time")


def train(out: Path, steps: int, microbatches: int, backend: str | None) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stage = gradsplit.distributed.load_stage(out / f"pipeline_{ranks}", rank, backend=backend)
    if rank == 0:
        parts = [(one.seconds / 3, one.seconds / 3, one.seconds / 3) for one in stage.layout.stages]
        rows = torch_schedule("1F1B", ranks, ranks, microbatches)
        print(f"predicted: {simulate_pipeline(rows, [StageCost(*part) for part in parts])}", flush=True)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=5e-4)
    text = load_tokens()
    for step in range(steps):
        start = time.perf_counter()
        tokens, targets = batch(text, step, 0, 1, MICROBATCH * microbatches, 128)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(tokens, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        if stage.is_last:
            took = 1e3 * (time.perf_counter() - start)
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}, {took:.0f} ms", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
