"""How well ``gradsplit.bucketing.simulate`` predicts a data-parallel step, for plans that differ much.

    python -m gradsplit.launch --nproc-per-node 2 tests/bench/ddp_prediction.py [--models gpt2,resnet50,bert] [--rows 6]

A compiled DDP module measures costs in its first steps, and chooses its buckets from them. With the same costs the step
is predicted for these and other buckets: stock DDP's, and many small ones. Only the step with one bucket must be known:
steps differ by how long their simulated backwards take. Plans take turns in rows of steps; times are the slowest
rank's. ``--check`` fails beyond 15%.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import gradsplit
from gradsplit.bucketing import reducer_plan, simulate
from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.distributed.gradients.buckets import Buckets
from tests.bench.ddp_sides import MEBIBYTE, SIDES, Running
from tests.bench.ddp_steps import (
    Ranks,
    exposed_ms,
    link_of,
    load_model,
    run_together,
    slowest_rows,
    start_process_group,
)
from tests.bench.rows import Row

# In which the module chooses its plan.
_SETTLING = 10
_IN_A_ROW = 5
# Steps after another plan was taken, whose transfers set connections up.
_SETTLING_OF_PLAN = 2
_ONE_BUCKET = "one bucket"
_ALLOWED = 0.15
_UNLIMITED = 1 << 60
# At which the first bucket is full, the second, and so on.
_LIMITS_BYTES: Mapping[str, tuple[int, ...]] = {
    _ONE_BUCKET: (_UNLIMITED,),
    "stock DDP's": (MEBIBYTE, 25 * MEBIBYTE),
    "buckets of 2 MiB": (2 * MEBIBYTE,),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--rows", type=int, default=6, help=f"of {_IN_A_ROW} steps, for each plan")
    parser.add_argument("--warm-up-s", type=float, default=1.5, help="of rows that do not count")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    device = start_process_group()
    torch.set_float32_matmul_precision("high")
    ranks = Ranks()
    headers = (
        "buckets",
        "exposed ms",
        "predicted",
        "step ms",
        "predicted",
        "off by",
        f"within {_ALLOWED:.0%}",
    )
    table = Table("link", "model", "plan", *headers)
    worst = 0.0
    for name in arguments.models.split(","):
        for row, error in _predictions(ranks, device, name, arguments.warm_up_s, arguments.rows):
            verdict = "known" if row[0] == _ONE_BUCKET else "yes" if error <= _ALLOWED else "NO"
            table.add_row(link_of(device), name, *row, f"{error:.1%}", verdict)
            worst = max(worst, error)
    if ranks.rank == 0:
        Console(width=120).print(table)
        print(f"the worst prediction is off by {worst:.1%}", flush=True)
    ranks.barrier()
    dist.destroy_process_group()
    if arguments.check and worst > _ALLOWED:
        sys.exit(1)


def _predictions(
    ranks: Ranks, device: torch.device, name: str, warm_up_s: float, rows: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    """For each plan its row of the table, and by what share the predicted step is off."""
    model, inputs = load_model(name, device.type)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with SIDES["ours-ddp"](copy.deepcopy(model).to(device), inputs) as running:
        for _ in range(_SETTLING):
            running.step()
        buckets, plans, costs = _settled(running)
        runs = {label: partial(_run_plan, running, buckets, plan, device) for label, plan in plans.items()}
        found_ms = {
            label: statistics.median(row.step_ms for row in found)
            for label, found in slowest_rows(ranks, runs, warm_up_s, rows).items()
        }
        rest_ms = found_ms[_ONE_BUCKET] - 1e3 * simulate(plans[_ONE_BUCKET], costs).end_s
        for label, plan in plans.items():
            buckets.adopt(plan)
            simulated = simulate(plan, costs)
            predicted_ms = rest_ms + 1e3 * simulated.end_s
            figures = (
                exposed_ms(ranks, running, device),
                simulated.exposed_ms,
                found_ms[label],
                predicted_ms,
            )
            row = (label, str(len(plan.buckets)), *(f"{ms:.2f}" for ms in figures))
            yield row, abs(predicted_ms / found_ms[label] - 1)


def _settled(running: Running) -> tuple[Buckets, dict[str, BucketPlan], CostModel]:
    """What a module has settled: its buckets, its plan and others for them, and the costs it has measured."""
    runner = gradsplit.distributed.inspect_ddp(running.call)
    buckets, chosen, costs = runner.buckets, runner.merge_plan, runner.costs
    assert buckets is not None and chosen is not None and costs is not None
    plans = {label: reducer_plan(chosen.plan.parameters, limits) for label, limits in _LIMITS_BYTES.items()}
    return buckets, {"chosen": chosen.plan, **plans}, costs


def _run_plan(running: Running, buckets: Buckets, plan: BucketPlan, device: torch.device) -> Row:
    buckets.adopt(plan)
    for _ in range(_SETTLING_OF_PLAN):
        running.step()
    return run_together(running.step, device, _IN_A_ROW)


if __name__ == "__main__":
    main()
