"""How well ``bucketing.simulate`` predicts a data-parallel step, for plans that differ much.

    python -m launch --nproc-per-node 2 tests/bench/ddp_prediction.py [--models gpt2,resnet50,bert] [--steps 20]

Costs are measured once: the link by all-reduces of several sizes, the step under a plan of one bucket, whose all-reduce
begins when everything is computed, so that nothing slows the backward down. Then the step is measured for one bucket,
for stock DDP's and for many small ones, and compared with the predicted one: the simulated backward, and what the first
plan's step took besides its backward. Times are the slowest rank's; ``--check`` fails beyond 15%.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import distributed
from bucketing import CostModel, LinkModel, Timeline, fit_link_model, reducer_plan, simulate
from tests.bench.ddp_sides import MEBIBYTE, SIDES, Running
from tests.bench.ddp_steps import Ranks, begin_together, link_of, load_model, start_process_group, step_ms

_WARM_UP = 12
_TIMELINES = 5
_ALLOWED = 0.15
_LINK_SAMPLES_BYTES = tuple(MEBIBYTE >> shift for shift in (6, 4, 2, 0)) + tuple(
    MEBIBYTE << shift for shift in (2, 4, 6)
)
# Caps of the first bucket and of the others.
_CAPS_BYTES: Mapping[str, tuple[int, int]] = {
    "one bucket": (1 << 60, 1 << 60),
    "stock DDP's": (MEBIBYTE, 25 * MEBIBYTE),
    "buckets of 2 MiB": (2 * MEBIBYTE, 2 * MEBIBYTE),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    device = start_process_group()
    torch.set_float32_matmul_precision("high")
    ranks = Ranks()
    link = _measured_link(ranks, device)
    table = Table(
        "link", "model", "plan", "buckets", "exposed ms", "predicted", "step ms", "predicted", "off by"
    )
    worst = 0.0
    for name in arguments.models.split(","):
        for row, error in _predictions(ranks, device, link, name, arguments.steps):
            table.add_row(link_of(device), name, *row)
            worst = max(worst, error)
    if ranks.rank == 0:
        Console(width=120).print(table)
        print(
            f"an all-reduce takes {1e6 * link.startup_s:.0f} us and 1 ms for each {1e-9 / link.seconds_per_byte:.2f} MB"
        )
        print(f"the worst prediction is off by {worst:.1%}", flush=True)
    ranks.barrier()
    dist.destroy_process_group()
    if arguments.check and worst > _ALLOWED:
        sys.exit(1)


def _predictions(
    ranks: Ranks, device: torch.device, link: LinkModel, name: str, steps: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    """For each plan its row of the table, and by what share the predicted step is off."""
    model, inputs = load_model(name, device.type)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with SIDES["ours-ddp"](copy.deepcopy(model).to(device), inputs) as running:
        for _ in range(_WARM_UP):
            running.step()
        buckets = distributed.inspect_ddp(running.call).buckets
        assert buckets is not None and buckets.plan is not None
        parameters = buckets.plan.parameters
        buckets.adopt(reducer_plan(parameters, *_CAPS_BYTES["one bucket"]))
        whole_ms = _median_ms(ranks, device, running.step, steps)
        costs, backward_ms = _measured_costs(ranks, device, running, link)
        for label, caps in _CAPS_BYTES.items():
            plan = reducer_plan(parameters, *caps)
            buckets.adopt(plan)
            found_ms = _median_ms(ranks, device, running.step, steps)
            exposed_ms = statistics.median(timeline.exposed_ms for timeline, _ in _recorded(running, device))
            simulated = simulate(plan, costs)
            predicted_ms = whole_ms - backward_ms + 1e3 * simulated.end_s
            error = abs(predicted_ms / found_ms - 1)
            figures = (exposed_ms, simulated.exposed_ms, found_ms, predicted_ms)
            yield (label, str(len(plan.buckets)), *(f"{ms:.2f}" for ms in figures), f"{error:.1%}"), error


def _measured_link(ranks: Ranks, device: torch.device) -> LinkModel:
    samples = []
    for size_bytes in _LINK_SAMPLES_BYTES:
        flat = torch.zeros(size_bytes // 4, device=device)
        samples.append(
            (size_bytes, 1e-3 * _median_ms(ranks, device, lambda flat=flat: dist.all_reduce(flat), 10))
        )
    return fit_link_model(samples)


def _measured_costs(
    ranks: Ranks, device: torch.device, running: Running, link: LinkModel
) -> tuple[CostModel, float]:
    """The slowest rank's, of a module whose gradients are reduced when all of them are computed; and how long its
    backward takes with that all-reduce."""
    mine = []
    for timeline, arrived_s in _recorded(running, device):
        length_ms = 1e3 * (timeline.end_s - timeline.start_s)
        end_s = timeline.busy("compute")[-1][1] - timeline.start_s
        mine.append((length_ms, end_s, {name: at_s - timeline.start_s for name, at_s in arrived_s.items()}))
    everyone = ranks.gather(sorted(mine, key=lambda cost: cost[0])[len(mine) // 2])
    backward_ms, end_s, _ = max(everyone, key=lambda cost: cost[0])
    ready_s = {name: min(end_s, max(others[name] for *_, others in everyone)) for name in everyone[0][2]}
    return CostModel(ready_s, end_s, link), backward_ms


def _recorded(running: Running, device: torch.device) -> list[tuple[Timeline, Mapping[str, float]]]:
    """Some backwards: what ran when, and when each gradient had come."""
    found = []
    for _ in range(_TIMELINES):
        begin_together(device)
        with distributed.record_timeline(running.call) as recorder:
            running.step()
        found.append((recorder.timeline(), recorder.arrived_s()))
    return found


def _median_ms(ranks: Ranks, device: torch.device, step: Callable[[], object], steps: int) -> float:
    """The slowest rank's, after some steps to warm up."""
    for _ in range(_WARM_UP):
        step()
    return max(ranks.gather(statistics.median(step_ms(step, device) for _ in range(steps))))


if __name__ == "__main__":
    main()
