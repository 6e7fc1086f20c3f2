"""How compile time grows with the size of a program: processor seconds of its first step at doubling sizes, by kind.

    python -m tests.bench.compile_growth [--kinds chain,layers] [--sizes 1000,2000] [--backend aot_eager] [--stages]

Each figure is the first forward and backward of a process of its own with an empty cache folder: processor time, of
the process and of all that it started, since on a machine that others use wall time says little. *Growth* is the time
over that of the size before, less what the smallest program of the kind takes, which is there at any size. A size is
about the number of operations in the program's forward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gradsplit
from gradsplit.compile_core.observe import stage_times
from tests.bench.compile_time import processor_seconds
from tests.bench.large_programs import PROGRAMS

ROOT = Path(__file__).parents[2]
TINY = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(PROGRAMS))
    parser.add_argument("--sizes", default="1250,2500,5000,10000,20000")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--stages", action="store_true", help="print what the stages took, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, size = arguments.child
        print(json.dumps(first_step(kind, int(size), arguments.backend)))
        return
    sizes = [int(size) for size in arguments.sizes.split(",")]
    table = Table("kind", *map(str, sizes), "largest growth", title=f"Processor seconds, {arguments.backend}")
    for kind in arguments.kinds.split(","):
        base_s = run_child(kind, TINY, arguments)["cpu_s"]
        seconds: list[float] = []
        for size in sizes:
            try:
                result = run_child(kind, size, arguments)
            except subprocess.SubprocessError as error:
                print(f"{kind} {size}: {error}", flush=True)
                break
            seconds.append(result["cpu_s"] - base_s)
            if arguments.stages:
                print(kind, size, f"{seconds[-1]:.1f}", result["stages"], flush=True)
        growth = max((b / a for a, b in itertools.pairwise(seconds)), default=float("nan"))
        row = [f"{value:.1f}" for value in seconds] + [""] * (len(sizes) - len(seconds))
        print(kind, *row, f"{growth:.2f}", flush=True)
        table.add_row(kind, *row, f"{growth:.2f}")
    Console().print(table)


def run_child(kind: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "GRADSPLIT_CACHE": cache,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        options = ["--backend", arguments.backend, "--child", kind, str(size)]
        output = subprocess.run(
            [sys.executable, "-m", "tests.bench.compile_growth", *options],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=arguments.timeout_s,
        )
    return json.loads(output.stdout.splitlines()[-1])


def first_step(kind: str, size: int, backend: str) -> dict[str, Any]:
    """What the first forward and backward cost, and how far the gradients are from eager's."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # In float32 the rounding of thousands of layers hides what is wrong.
    torch.set_default_dtype(torch.float64)
    program = PROGRAMS[kind](size)
    expected = program.step(program.function)
    stage_times.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    compiled: Callable[..., Any] = gradsplit.compile(program.function, backend=backend)
    start_s = processor_seconds()
    found = program.step(compiled)
    cpu_s = processor_seconds() - start_s
    start_s = time.process_time()
    for _ in range(5):
        program.step(compiled)
    step_ms = (time.process_time() - start_s) * 200
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * (1 + theirs.norm()), (kind, size)
    times = stage_times.Stopwatch.__new__(stage_times.Stopwatch)
    times._before = {}
    return {
        "cpu_s": cpu_s,
        "stages": {stage: round(sum(values), 2) for stage, values in times.seconds().items()}
        | {"step_ms": round(step_ms, 2)},
    }


if __name__ == "__main__":
    main()
