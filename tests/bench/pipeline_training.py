"""Steps of a GPT in as many stages as there are ranks: predicted and measured, and beside torch's own pipeline.

    python -m gradsplit.launch --nproc-per-node 2 -m tests.bench.pipeline_training

The model is examples/gpt.py; each rank computes on one thread. What a microbatch costs in a stage is the median of what
was measured in the steps themselves, so the prediction is about the schedule, not about the kernels. Ranks need a core
each: on a machine that is busy, or has fewer cores, the measured bubble is that of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class

from examples.gpt import GPT, GPTConfig
from gradsplit.bucketing import Action, PipelineTimeline, StageCost, plot_pipeline, simulate_pipeline
from gradsplit.bucketing.simulate_pipeline import ComputeSpan
from gradsplit.distributed import export_pipeline, load_stage
from gradsplit.distributed.pipeline.torch_schedules import SINGLE, torch_schedule


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Watched:
    """Notes when a stage computes what."""

    def __init__(self, stage: Any) -> None:
        self.spans: list[ComputeSpan] = []
        self._stage = stage
        self._watch("forward_one_chunk", lambda arguments: "F")
        self._watch(
            "backward_one_chunk", lambda arguments: "B" if arguments.get("full_backward", True) else "I"
        )
        self._watch("backward_weight_one_chunk", lambda arguments: "W")
        self._inside = False

    def _watch(self, name: str, kind: Callable[[dict[str, Any]], str]) -> None:
        call = getattr(self._stage, name)

        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a whole backward calls that of weights
                return call(microbatch, *args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return call(microbatch, *args, **kwargs)
            finally:
                self._inside = False
                action = Action(self._stage.stage_index, kind(kwargs), microbatch)
                self.spans.append(ComputeSpan(action, start, time.perf_counter()))

        setattr(self._stage, name, run)


def steps_of(
    stage: Any, name: str, microbatches: int, batch: tuple[torch.Tensor, torch.Tensor], count: int
) -> Any:
    """The median of the steps' seconds, and of that step the spans of this rank."""
    kind = get_schedule_class(name)
    schedule = kind(stage if name in SINGLE else [stage], microbatches, loss_fn=loss_of)
    watched = Watched(stage)
    found = []
    for step in range(count + 2):
        stage.submod.zero_grad()
        dist.barrier()
        watched.spans.clear()
        start = time.perf_counter()
        schedule.step(
            *((batch[0],) if stage.is_first else ()), target=batch[1], losses=[], return_outputs=False
        )
        dist.barrier()
        if step >= 2:
            found.append((time.perf_counter() - start, list(watched.spans)))
    found.sort(key=lambda item: item[0])
    return found[len(found) // 2][0], [spans for _, spans in found], found[len(found) // 2][1]


def costs_of(every: list[list[list[ComputeSpan]]]) -> list[StageCost]:
    """By stage, from the spans of all steps of all ranks: medians."""
    costs = []
    for steps in every:
        seconds = defaultdict(list)
        for span in (span for spans in steps for span in spans):
            seconds[span.action.kind].append(span.end_s - span.start_s)
        medians = {kind: statistics.median(found) for kind, found in seconds.items()}
        whole = medians.get("B", 0.0)
        costs.append(StageCost(medians["F"], medians.get("I", whole / 2), medians.get("W", whole / 2)))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--backends", nargs="*", default=["triton", "aot_eager"])
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    config = GPTConfig(layers=options.layers, width=options.width)
    model = GPT(config)
    tokens = torch.randint(config.vocabulary, (options.microbatches * 4, config.context))
    one = tokens[:4]
    place = Path(str(folder[0])) / "pipeline"
    if rank == 0:
        export_pipeline(model, (one,), ranks, folder=place)
    dist.barrier()

    def report(what: str, seconds: float) -> None:
        if rank == 0:
            print(f"{what}: {1e3 * seconds:.1f} ms a step", flush=True)

    for backend in options.backends:
        for name in ("1F1B", "InterleavedZeroBubble"):
            stage = load_stage(place, rank, backend=backend)
            seconds, steps, spans = steps_of(
                stage, name, options.microbatches, (tokens, tokens), options.steps
            )
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, (steps, spans))
            report(f"{backend} {name}", seconds)
            if rank == 0:
                predicted = simulate_pipeline(
                    torch_schedule(name, ranks, ranks, options.microbatches),
                    costs_of([steps for steps, _ in every]),
                )
                measured = PipelineTimeline(tuple(tuple(spans) for _, spans in every), (0,) * ranks)
                print(
                    f"  bubble: predicted {100 * predicted.bubble:.1f} %, measured {100 * measured.bubble:.1f} %; "
                    f"step: predicted {1e3 * predicted.duration_s:.1f} ms, measured {1e3 * measured.duration_s:.1f} ms",
                    flush=True,
                )
                Path(options.out).mkdir(exist_ok=True)
                plot_pipeline(measured, Path(options.out) / f"pipeline_{backend}_{name}.png")

    points = {f"blocks.{options.layers * k // ranks}": SplitPoint.BEGINNING for k in range(1, ranks)}
    for compiled in (False, True):
        pipe = pipeline(GPT(config), mb_args=(one,), split_spec=points)  # it changes the model
        stage = pipe.build_stage(rank, torch.device("cpu"))
        if compiled:
            stage.submod = torch.compile(stage.submod)
        seconds, _, _ = steps_of(stage, "1F1B", options.microbatches, (tokens, tokens), options.steps)
        report(f"torch's pipeline, {'torch.compile' if compiled else 'eager'} 1F1B", seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
