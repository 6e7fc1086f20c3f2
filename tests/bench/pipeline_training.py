"""Steps of pipelines, ours beside torch's own, and bubbles predicted and measured.

    python -m gradsplit.launch --nproc-per-node 2 -m tests.bench.pipeline_training [--device cuda] [--models gpt2 llama]

Sides of a model live in one process a rank, hold the same weights, and take turns in rows of steps (``rows.py``): ours
under several schedules, and torch's 1F1B with eager and with torch.compile'd stages, cut where ours are. Losses are
computed by a function that each side compiles in its own way. What a microbatch costs in a stage is what was measured
in the steps themselves, so predictions are about the schedule, not about the kernels: one with the median of each kind
of action, and one ("varied") with times drawn from what was measured, since who waits waits for the slower one. Ranks
need a core, or a GPU, each. On a CPU each rank computes on one thread; on a GPU weights are bfloat16.

With ``--replicas`` so many pipelines train on data of their own and average their gradients: ours by ``load_stage``'s
``replicas``, torch's stages in DDP, which averages with the last microbatch's backward.

With ``--asleep`` the model is tiny, and each computation of ours sleeps until it has lasted so long, a whole backward
twice as long. So schedules are compared with their predictions where cores lack.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.bucketing import (
    Action,
    PipelineSchedule,
    PipelineTimeline,
    StageCost,
    plot_pipeline,
    simulate_pipeline,
)
from gradsplit.bucketing.simulate_pipeline import BETWEEN, ComputeSpan
from gradsplit.distributed import export_pipeline, load_stage
from gradsplit.distributed.pipeline.torch_schedules import IN_A_V, SINGLE, torch_schedule
from tests.bench.pipeline_models import MODELS, SIZES, nearest_layers, torch_stage
from tests.bench.rows import Row, rows_in_turn, run_row, synchronise

# A schedule of ours, and how many stages each rank has.
OURS = (("1F1B", 1), ("InterleavedZeroBubble", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2))
_WATCHED_STEPS = 7
_DRAWN_STEPS = 101


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Watched:
    """Notes when the stages of a rank compute what, while ``is_on``; a loss belongs to the forward before it.

    Args:
        asleep_s: what a forward, and half of a backward, is made to last.
    """

    def __init__(self, stages: Sequence[Any], device: torch.device, asleep_s: float) -> None:
        self.is_on, self._asleep_s = False, asleep_s
        self._device, self._found, self._inside = device, [], False
        for stage in stages:
            self._watch(stage, "forward_one_chunk", lambda arguments: "F")
            self._watch(
                stage,
                "backward_one_chunk",
                lambda arguments: "B" if arguments.get("full_backward", True) else "I",
            )
            self._watch(stage, "backward_weight_one_chunk", lambda arguments: "W")

    def start(self) -> None:
        self._found: list[list[Any]] = []
        # Processes of a machine have one clock, GPUs one each.
        self._base, self.is_on = self._now() if self._device.type == "cuda" else 0.0, True

    def spans(self) -> list[ComputeSpan]:
        """Since ``start``, in seconds since then."""
        self.is_on = False
        synchronise(self._device)
        return [
            ComputeSpan(action, self._seconds(start), self._seconds(end))
            for action, start, end in self._found
        ]

    def loss(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def run(logits: Tensor, targets: Tensor) -> Tensor:
            loss = loss_fn(logits, targets)
            if self.is_on:
                self._found[-1][2] = self._now()
            return loss

        return run

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        is_event = self._device.type == "cuda"
        return self._base.elapsed_time(moment) / 1e3 if is_event else moment - self._base

    def _watch(self, stage: Any, name: str, kind: Callable[[dict[str, Any]], str]) -> None:
        call = getattr(stage, name)

        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.is_on:  # a whole backward calls that of weights
                return call(microbatch, *args, **kwargs)
            self._inside, start, began = True, self._now(), time.perf_counter()
            action = Action(stage.stage_index, kind(kwargs), microbatch)
            try:
                return call(microbatch, *args, **kwargs)
            finally:
                self._inside = False
                lasts = self._asleep_s * (2 if action.kind == "B" else 1)
                time.sleep(max(0.0, began + lasts - time.perf_counter()))
                self._found.append([action, start, self._now()])

        setattr(stage, name, run)


class Side:
    """One way to take a step of a model."""

    def __init__(
        self,
        name: str,
        schedule: str,
        stages: Sequence[Any],
        loss_fn: Callable[..., Tensor],
        microbatches: int,
        tokens: Tensor,
        asleep_s: float,
    ) -> None:
        self.name, self.schedule, self.stages = name, schedule, sorted(stages, key=lambda s: s.stage_index)
        self.watched = Watched(self.stages, tokens.device, asleep_s)
        given: Any = self.stages[0] if schedule in SINGLE else self.stages
        self._made = get_schedule_class(schedule)(given, microbatches, loss_fn=self.watched.loss(loss_fn))
        self._args = (tokens,) if any(stage.is_first for stage in self.stages) else ()
        self._targets, self.losses = tokens, []

    def step(self) -> None:
        for stage in self.stages:
            stage.submod.zero_grad()
        self.losses: list[Tensor] = []
        self._made.step(*self._args, target=self._targets, losses=self.losses, return_outputs=False)


@dataclass(frozen=True)
class Groups:
    """A rank's groups.

    Attributes:
        all: every rank, by gloo, for what is not measured; ``quiet``: likewise, those of its pipeline.
        pipeline: the stages of its pipeline.
        replicas: those that have its stages, one in each pipeline; without, there is one pipeline.
    """

    all: dist.ProcessGroup
    quiet: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None

    @staticmethod
    def make(replicas: int) -> Groups:
        """Pipelines of neighbouring ranks."""
        count = dist.get_world_size() // replicas
        rows = [[*range(first, first + count)] for first in range(0, replicas * count, count)]

        def mine(groups: Sequence[Sequence[int]], backend: str | None = None) -> Any:
            made = [dist.new_group(ranks, backend=backend) for ranks in groups]
            return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)

        columns = [*zip(*rows, strict=True)]
        return Groups(
            mine([range(dist.get_world_size())], "gloo"),
            mine(rows, "gloo"),
            mine(rows),
            mine(columns) if replicas > 1 else None,
        )

    @property
    def pipeline_number(self) -> int:
        return dist.get_rank() // dist.get_world_size(self.quiet)


@dataclass(frozen=True)
class Bubble:
    """Of a side: predicted from its own costs, if each kind of action always took as long, and as it varied, and
    measured, the median of some steps; and these costs."""

    even: PipelineTimeline
    varied: PipelineTimeline
    measured: PipelineTimeline
    seconds: Mapping[tuple[int, str], list[float]]

    def costs(self) -> str:
        """Milliseconds of each kind of action, by stage: medians."""
        kinds = sorted(key for key in self.seconds if key[1] in "FBIW")
        return ", ".join(
            f"{kind}{stage} {1e3 * statistics.median(self.seconds[stage, kind]):.2f}" for stage, kind in kinds
        )


class Bench:
    """A model's sides on this rank, of this rank's pipeline."""

    def __init__(self, model: str, device: torch.device, options: argparse.Namespace, groups: Groups) -> None:
        self.model, self.device, self.options, self.groups = model, device, options, groups
        self.rank, self.ranks = dist.get_rank(groups.quiet), dist.get_world_size(groups.quiet)
        sizes = SIZES[model, device.type]
        self.sizes = replace(sizes, layers=options.layers or sizes.layers, width=options.width or sizes.width)
        if options.asleep:
            self.sizes = replace(self.sizes, width=64, length=32)
        torch.manual_seed(1 + groups.pipeline_number)
        shape = options.microbatches * self.sizes.batch, self.sizes.length
        self.tokens = torch.randint(self.sizes.vocabulary, shape).to(device)
        self.one = self.tokens[: self.sizes.batch]
        self.sides: dict[str, Side] = {}
        self.cuts: list[int] = []

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    def make(self) -> Any:
        torch.manual_seed(0)
        model = MODELS[self.model](self.sizes)
        return model.to(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)

    def set_up(self, folder: Path) -> None:
        """Exports, loads, compiles: each side takes its first step."""
        wanted = [one for one in OURS if one[0] in self.options.schedules]
        for mode, (schedule, per_rank) in itertools.product(self.options.modes, wanted):
            place = folder / f"{self.model}_{per_rank}"
            stages = self.ranks * per_rank
            start = time.perf_counter()
            if dist.get_rank() == 0 and not place.exists():
                export_pipeline(
                    self.make(), (self.one,), stages, folder=place, loss=(loss_of, self.one), strict=False
                )
            dist.barrier(self.groups.all)
            exported = time.perf_counter()
            last = stages - 1 - self.rank
            mine = [self.rank, last] if schedule in IN_A_V else range(self.rank, stages, self.ranks)
            loaded = [
                load_stage(
                    place,
                    k,
                    self.device,
                    backend=self.options.backend,
                    mode=mode,
                    group=self.groups.pipeline,
                    replicas=self.groups.replicas,
                )
                for k in mine
            ]
            if per_rank == 1:
                names: list[Any] = [None] * self.ranks
                dist.all_gather_object(names, [*loaded[0].state_dict()], self.groups.quiet)
                self.cuts = nearest_layers(self.model, names, self.sizes.layers)
            side = "ours" if mode == "default" else "ours, graphs"
            self._add(side, schedule, loaded, gradsplit.compile(loss_of))
            self.say(
                f"{side} {schedule}: export {exported - start:.1f} s, load, compile and first step "
                f"{time.perf_counter() - exported:.1f} s"
            )
        self.say(f"torch's stages are cut before layers {self.cuts} of {self.sizes.layers}, where ours are")
        for name in ("eager", "torch.compile"):
            if name not in self.options.peers:
                continue
            start = time.perf_counter()
            cuts = self.cuts or [self.sizes.layers * (k + 1) // self.ranks for k in range(self.ranks - 1)]
            stage, how = torch_stage(
                self.model, self.make, self.sizes, cuts, self.one, self.rank, self.groups.pipeline
            )
            loss_fn: Callable[..., Tensor] = loss_of
            if name == "torch.compile":
                stage.submod, loss_fn = torch.compile(stage.submod), torch.compile(loss_of)
            if self.groups.replicas is not None:
                ids = [self.device.index] if self.device.type == "cuda" else None
                inner = stage.submod
                stage.submod = DistributedDataParallel(inner, ids, process_group=self.groups.replicas)
                if hasattr(inner, "graph"):
                    # Stages of pipeline() read it off their module.
                    stage.submod.graph = inner.graph
            self._add(name, "1F1B", [stage], loss_fn)
            self.say(f"torch's {how}, {name}: first step after {time.perf_counter() - start:.1f} s")

    def _add(self, name: str, schedule: str, stages: Sequence[Any], loss_fn: Callable[..., Tensor]) -> None:
        side = Side(
            name, schedule, stages, loss_fn, self.options.microbatches, self.tokens, self.options.asleep
        )
        for _ in range(2):
            side.step()
        synchronise(self.device)
        dist.barrier(self.groups.all)
        self.sides[f"{name} {schedule}"] = side

    def rows(self) -> dict[str, list[Row]]:
        def agree(mine: bool) -> bool:
            answer = torch.tensor([mine], dtype=torch.int32)
            dist.all_reduce(answer, dist.ReduceOp.MIN, group=self.groups.all)
            return bool(answer)

        def run(side: Side) -> Row:
            dist.barrier(self.groups.all)
            return run_row(side.step, self.device, self.options.steps)

        runs = {key: lambda side=side: run(side) for key, side in self.sides.items()}
        warm_up_s = 1.5 if self.device.type == "cuda" else 0.0
        return rows_in_turn(runs, warm_up_s, self.options.rows, agree)

    def bubble(self, side: Side) -> Bubble:
        steps = []
        for _ in range(_WATCHED_STEPS):
            synchronise(self.device)
            dist.barrier(self.groups.all)
            side.watched.start()
            side.step()
            steps.append(side.watched.spans())
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, steps, self.groups.quiet)
        measured = [
            PipelineTimeline(tuple(tuple(rank[k]) for rank in every), (0,) * self.ranks)
            for k in range(_WATCHED_STEPS)
        ]
        stages = self.ranks * len(side.stages)
        rows = torch_schedule(side.schedule, self.ranks, stages, self.options.microbatches)
        seconds = seconds_of_actions([timeline.rows for timeline in measured])
        even, varied = predictions(rows, seconds)
        measured.sort(key=lambda timeline: timeline.bubble)
        return Bubble(even, varied, measured[len(measured) // 2], seconds)


def seconds_of_actions(
    steps: Sequence[Sequence[Sequence[ComputeSpan]]],
) -> dict[tuple[int, str], list[float]]:
    """By stage and kind what actions took in some steps, of each of which the spans are given by rank.

    A message takes from the end of what sends it to the start of what waited for it, with all that ranks do between.
    """
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in steps:
        ends = {span.action: (span.end_s, rank) for rank, row in enumerate(step) for span in row}
        for rank, row in enumerate(step):
            for span in row:
                seconds[span.action.stage, span.action.kind].append(span.end_s - span.start_s)
            for before, span in pairwise(row):
                stage = before.action.stage
                needed_s, message = needed(span.action, rank, ends)
                if message is not None and needed_s > before.end_s:
                    seconds[message].append(span.start_s - needed_s)
                else:
                    seconds[stage, BETWEEN].append(span.start_s - before.end_s)
    return seconds


def needed(
    action: Action, rank: int, ends: Mapping[Action, tuple[float, int]]
) -> tuple[float, tuple[int, str] | None]:
    """When another rank had computed what an action needs, and the stage and kind of the message that brought it."""
    before, kinds, message = (-1, "F", "SEND_F") if action.kind == "F" else (1, "BI", "SEND_B")
    for kind in "" if action.kind == "W" else kinds:
        found = ends.get(Action(action.stage + before, kind, action.microbatch))
        if found is not None and found[1] != rank:
            return found[0], (action.stage + before, message)
    return 0.0, None


def predictions(
    schedule: PipelineSchedule, seconds: Mapping[tuple[int, str], list[float]]
) -> tuple[PipelineTimeline, PipelineTimeline]:
    """With the median of each kind of action, and with what they took drawn at random, the median of some."""
    medians = {key: statistics.median(found) for key, found in seconds.items()}

    def cost(stage: int) -> StageCost:
        half = medians.get((stage, "B"), 0.0) / 2
        kinds = (("F", 0.0), ("I", half), ("W", half), ("SEND_F", 0.0), ("SEND_B", 0.0), (BETWEEN, 0.0))
        return StageCost(*(medians.get((stage, kind), default) for kind, default in kinds))

    costs = [cost(stage) for stage in range(schedule.num_stages)]
    chance = random.Random(0)

    def draw(stage: int, kind: str) -> float:
        found = seconds.get((stage, kind))
        return chance.choice(found) if found else costs[stage].seconds(kind)

    drawn = [simulate_pipeline(schedule, costs, draw) for _ in range(_DRAWN_STEPS)]
    drawn.sort(key=lambda timeline: timeline.bubble)
    return simulate_pipeline(schedule, costs), drawn[len(drawn) // 2]


def run_model(
    name: str, device: torch.device, options: argparse.Namespace, groups: Groups, folder: Path
) -> list[str]:
    """The lines of its table."""
    bench = Bench(name, device, options, groups)
    bench.set_up(folder)
    rows = bench.rows()
    lines = []
    for key, side in bench.sides.items():
        bubble = bench.bubble(side)
        found = sorted(row.step_ms for row in rows[key])
        losses: list[Any] = [None] * bench.ranks
        dist.all_gather_object(losses, [loss.item() for loss in side.losses], groups.quiet)
        loss = statistics.mean(loss for some in losses for loss in some)
        varied, measured = bubble.varied, bubble.measured
        lines.append(
            f"{name:6} {side.name:14} {side.schedule:22} {statistics.median(found):8.2f} {found[0]:8.2f} "
            f"{1e3 * varied.duration_s:9.2f} {1e3 * measured.duration_s:8.2f} "
            f"{100 * bubble.even.bubble:8.1f} {100 * varied.bubble:8.1f} {100 * measured.bubble:8.1f} {loss:8.4f}"
            f"  {bubble.costs()}"
        )
        if dist.get_rank() == 0 and options.out:
            Path(options.out).mkdir(exist_ok=True, parents=True)
            path = Path(options.out) / f"pipeline_{name}_{side.name}_{side.schedule}.png"
            plot_pipeline(measured, path)
    return lines


HEADER = (
    f"{'model':6} {'side':14} {'schedule':22} {'step ms':>8} {'least':>8} {'predicted':>9} {'measured':>8} "
    f"{'bubble %':>8} {'varied':>8} {'measured':>8} {'loss':>8}  medians of actions in ms"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--schedules", nargs="*", default=[schedule for schedule, _ in OURS])
    parser.add_argument("--peers", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="pipelines")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--width", type=int, help="likewise")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--steps", type=int, help="in a row; 10 on a GPU and 3 on a CPU by default")
    parser.add_argument("--backend", help="of our stages; generated kernels by default")
    parser.add_argument(
        "--modes", nargs="*", default=["default"], help="of our stages; reduce-overhead for graphs"
    )
    parser.add_argument("--asleep", type=float, default=0.0, help="seconds; see above")
    parser.add_argument("--out", help="a folder for pictures of the steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.steps = options.steps or (10 if options.device == "cuda" else 3)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    groups = Groups.make(options.replicas)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, group=groups.all)
    lines = []
    for name in options.models:
        lines += run_model(name, device, options, groups, Path(folder[0]))
        if dist.get_rank() == 0:
            print("\n".join([HEADER, *lines]), flush=True)
    dist.barrier(groups.all)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
