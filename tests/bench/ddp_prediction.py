"""How well ``bucketing.simulate`` predicts a data-parallel step, for plans that differ much.

    python -m launch --nproc-per-node 2 tests/bench/ddp_prediction.py [--models gpt2,resnet50,bert] [--steps 20]

A compiled DDP module measures costs in its first steps, and chooses its buckets from them. With the same costs the step
is predicted for these and other buckets: stock DDP's, and many small ones. Only the step with one bucket must be known:
steps differ by how long their simulated backwards take. Times are the slowest rank's; ``--check`` fails beyond 15%.
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
from bucketing import reducer_plan, simulate
from tests.bench.ddp_sides import MEBIBYTE, SIDES, Running
from tests.bench.ddp_steps import Ranks, begin_together, link_of, load_model, start_process_group, step_ms

_WARM_UP = 12
# Steps after another plan was taken, whose transfers set connections up.
_WARM_UP_OF_PLAN = 3
_TIMELINES = 5
_ALLOWED = 0.15
_UNLIMITED = 1 << 60
# At which the first bucket is full, the second, and so on.
_LIMITS_BYTES: Mapping[str, tuple[int, ...]] = {
    "stock DDP's": (MEBIBYTE, 25 * MEBIBYTE),
    "buckets of 2 MiB": (2 * MEBIBYTE,),
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
    table = Table(
        "link", "model", "plan", "buckets", "exposed ms", "predicted", "step ms", "predicted", "off by"
    )
    worst = 0.0
    for name in arguments.models.split(","):
        for row, error in _predictions(ranks, device, name, arguments.steps):
            table.add_row(link_of(device), name, *row)
            worst = max(worst, error)
    if ranks.rank == 0:
        Console(width=120).print(table)
        print(f"the worst prediction is off by {worst:.1%}", flush=True)
    ranks.barrier()
    dist.destroy_process_group()
    if arguments.check and worst > _ALLOWED:
        sys.exit(1)


def _predictions(
    ranks: Ranks, device: torch.device, name: str, steps: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    """For each plan its row of the table, and by what share the predicted step is off."""
    model, inputs = load_model(name, device.type)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with SIDES["ours-ddp"](copy.deepcopy(model).to(device), inputs) as running:
        for _ in range(_WARM_UP):
            running.step()
        runner = distributed.inspect_ddp(running.call)
        buckets, chosen, costs = runner.buckets, runner.merge_plan, runner.costs
        assert buckets is not None and chosen is not None and costs is not None
        ready = chosen.plan.parameters
        plans = {label: reducer_plan(ready, limits) for label, limits in _LIMITS_BYTES.items()}
        one_bucket = reducer_plan(ready, [_UNLIMITED])
        buckets.adopt(one_bucket)
        rest_ms = _median_ms(ranks, device, running.step, steps) - 1e3 * simulate(one_bucket, costs).end_s
        for label, plan in {"chosen": chosen.plan, **plans}.items():
            buckets.adopt(plan)
            found_ms = _median_ms(ranks, device, running.step, steps)
            exposed_ms = max(ranks.gather(_exposed_ms(running, device)))
            simulated = simulate(plan, costs)
            predicted_ms = rest_ms + 1e3 * simulated.end_s
            error = abs(predicted_ms / found_ms - 1)
            figures = (exposed_ms, simulated.exposed_ms, found_ms, predicted_ms)
            yield (label, str(len(plan.buckets)), *(f"{ms:.2f}" for ms in figures), f"{error:.1%}"), error


def _exposed_ms(running: Running, device: torch.device) -> float:
    """This rank's, in a median backward."""
    found = []
    for _ in range(_TIMELINES):
        begin_together(device)
        with distributed.record_timeline(running.call) as recorder:
            running.step()
        found.append(recorder.timeline().exposed_ms)
    return statistics.median(found)


def _median_ms(ranks: Ranks, device: torch.device, step: Callable[[], object], steps: int) -> float:
    """The slowest rank's, after some steps to warm up."""
    for _ in range(_WARM_UP_OF_PLAN):
        step()
    return max(ranks.gather(statistics.median(step_ms(step, device) for _ in range(steps))))


if __name__ == "__main__":
    main()
