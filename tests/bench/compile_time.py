"""Seconds to the end of the first training step, and of the steps behind it: ours beside TorchInductor's, on the CPU.

    python -m tests.bench.compile_time [--models gpt2,bert,resnet18,mlp] [--rounds 1] [--steps 20] [--profile]

*Cold* is the first forward and backward of a fresh process with an empty cache folder, *warm* the same again in
another process with the cache that the cold one left. Imports are done before the clock starts, on both sides. On a
machine that others use too wall time says little, so the table has the processor time beside it: user and system, of
the process and all that it started. Both lack the time of one step that is already compiled.

*Step* is the median over steps of forward and backward, eager, ours and Inductor's alternating in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gradsplit
from gradsplit.compile_core.observe.stage_times import compile_times
from tests.bench.training_models import TRAININGS, Training

ROOT = Path(__file__).parents[2]
SIDES = ("gradsplit", "inductor")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Figures:
    """What was measured of one model.

    Attributes:
        first: seconds of the first step by side, state of the cache ("cold", "warm") and clock ("wall_s", "cpu_s").
        steps: milliseconds of a later step, by side.
    """

    first: dict[tuple[str, str, str], float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    def row(self, side: str) -> list[float]:
        return [self.first[side, state, clock] for state in ("cold", "warm") for clock in ("wall_s", "cpu_s")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(TRAININGS))
    parser.add_argument("--rounds", type=int, default=1, help="fresh processes for each figure")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print what our stages took, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, model = arguments.child
        result = compare_steps(model, arguments.steps) if what == "steps" else first_step(what, model)
        print(json.dumps(result))
        return
    names = arguments.models.split(",")
    measured: dict[str, Figures] = {}
    for name in names:
        measured[name] = measure(name, arguments.rounds, arguments.steps, arguments.profile)
        print_tables(measured)


def measure(model: str, rounds: int, steps: int, profile: bool) -> Figures:
    """All figures of one model, each from processes of its own."""
    figures = Figures()
    for side in SIDES:
        runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as cache:
                for state in runs:
                    runs[state].append(run_child(side, model, cache))
        for state, results in runs.items():
            for clock in ("wall_s", "cpu_s"):
                figures.first[side, state, clock] = statistics.median(result[clock] for result in results)
            if profile and side == "gradsplit":
                print(f"{model}, {state}:\n{results[-1]['stages']}\n", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        figures.steps = run_child("steps", model, cache, f"--steps={steps}")
    return figures


def run_child(what: str, model: str, cache: str, *more: str) -> dict[str, Any]:
    """One measurement in a process of its own, all caches of both sides in ``cache``."""
    environment = {
        **os.environ,
        "GRADSPLIT_CACHE": f"{cache}/gradsplit",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.bench.compile_time", *more, "--child", what, model]
    output = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(output.stdout.splitlines()[-1])


def compiled_by(side: str, training: Training) -> Callable[[], None]:
    """A function that does forward and backward of a training step."""
    model, inputs = training
    if side == "eager":
        compiled: Any = model
    elif side == "gradsplit":
        compiled = gradsplit.compile(model)
    else:
        compiled = torch.compile(model)

    def step() -> None:
        loss: Tensor = compiled(**inputs)
        loss.backward()

    return step


def first_step(side: str, name: str) -> dict[str, Any]:
    """What the first step costs beyond a later one."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    import_compilers()
    compiled_by("eager", training)()
    step = compiled_by(side, training)
    first_wall_s, first_cpu_s = clocked(step)
    later = [clocked(step) for _ in range(3)]
    return {
        "wall_s": first_wall_s - min(wall_s for wall_s, _ in later),
        "cpu_s": first_cpu_s - min(cpu_s for _, cpu_s in later),
        "stages": compile_times(aggregate=True),
    }


def import_compilers() -> None:
    """What either compiler imports when it is first used."""
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401


def clocked(step: Callable[[], None]) -> tuple[float, float]:
    """Wall seconds and processor seconds of one call."""
    start_wall_s, start_cpu_s = time.perf_counter(), processor_seconds()
    step()
    return time.perf_counter() - start_wall_s, processor_seconds() - start_cpu_s


def processor_seconds() -> float:
    """User and system time of this process and all processes below it, dead or alive."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended just now
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= grown
    return sum(ticks[pid] for pid in mine) / _TICKS_PER_S


def compare_steps(name: str, steps: int) -> dict[str, float]:
    """Median milliseconds of a step, the three sides alternating."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    sides = {side: compiled_by(side, training) for side in ("eager", *SIDES)}
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for round_number in range(steps + 3):
        for side, step in sides.items():
            start_s = time.perf_counter()
            step()
            if round_number >= 3:
                times_s[side].append(time.perf_counter() - start_s)
    return {side: 1e3 * statistics.median(times) for side, times in times_s.items()}


def print_tables(measured: dict[str, Figures]) -> None:
    first = Table(
        "model", "side", "cold wall s", "cold cpu s", "warm wall s", "warm cpu s", title="First step"
    )
    for name, figures in measured.items():
        for side in SIDES:
            first.add_row(name, side, *(f"{value:.2f}" for value in figures.row(side)))
        shares = [ours / theirs for ours, theirs in zip(*(figures.row(side) for side in SIDES), strict=True)]
        first.add_row("", "share", *(f"{share:.0%}" for share in shares), end_section=True)
    steps = Table("model", "eager ms", "gradsplit ms", "inductor ms", "gradsplit / inductor", title="Step")
    ratios = []
    for name, figures in measured.items():
        times = figures.steps
        ratios.append(times["gradsplit"] / times["inductor"])
        steps.add_row(name, *(f"{times[side]:.2f}" for side in ("eager", *SIDES)), f"{ratios[-1]:.2f}")
    steps.add_row("geometric mean", "", "", "", f"{statistics.geometric_mean(ratios):.2f}")
    console = Console()
    console.print(first)
    console.print(steps)


if __name__ == "__main__":
    main()
