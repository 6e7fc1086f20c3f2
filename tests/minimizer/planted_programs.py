"""Programs of any length with one planted fault somewhere, and what becomes of them under the minimizer.

``python -m tests.minimizer.planted_programs [--workers N] [CALLS] [NAME ...]`` plants each fault, or those named, into
a program of so many rows of one to three calls (200), makes it smaller, and prints what was left in a table.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.forked_ranks import run_forked
from tests.minimizer.planted_faults import FAULTS, VARIABLE
from tests.start_ranks import ROOT, python_path

LIMIT_S = 600
_CALLS = (torch.tanh, torch.cos, torch.relu, torch.nn.functional.gelu, lambda x: x * 0.5, lambda x: x + 0.25)


class Program(torch.nn.Module):
    """Calls in a row, some of which also read an earlier value, with what the fault needs in their midst."""

    def __init__(self, name: str, calls: int) -> None:
        super().__init__()
        self.needs = FAULTS[name].needs
        choices = random.Random(f"{name} {calls}")
        self.position = choices.randrange(calls // 4, calls)
        self.rows = [(choices.randrange(len(_CALLS)), choices.randrange(8)) for _ in range(calls)]
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        recent, results = [x * self.weight], []
        for k, (call, back) in enumerate(self.rows):
            if k == self.position:
                recent.append(self.needs(recent[-1] + 2 * x))  # of ordinary numbers, whatever came before
                results.append(recent[-1])
            value = _CALLS[call](recent[-1])
            recent.append(value + recent[max(-1 - back, -len(recent))] * 0.5 if back % 3 == 0 else value)
            recent = recent[-8:]
            if k % 20 == 0:  # a wrong value is damped by what follows it
                results.append(recent[-1])
        return *results, recent[-1], recent[-2].sum()


def inputs() -> list[Tensor]:
    return [torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()]


@dataclass(frozen=True)
class Found:
    """What was left of a program.

    Attributes:
        calls: in the small program; 0 if none was written.
        fails_alone: running it fails.
    """

    calls: int
    fails_alone: bool
    seconds: float
    said: str


def minimized(name: str, calls: int, folder: Path, after: str = "capture") -> Found:
    """Makes a program with a fault smaller, as somebody would on the command line; its graph ``after`` this stage."""
    fault = FAULTS[name]
    file = folder / "large.py"
    file.write_text(
        "from tests.minimizer import planted_faults\n"
        "from tests.minimizer.planted_programs import Program as Planted, inputs\n"
        "from gradsplit.minimize import Settings\n"
        "IMPORTS = ('tests.minimizer.planted_faults',)\n"
        f"SETTINGS = Settings({fault.backend!r}, IMPORTS, level={fault.level}, ranks={fault.ranks})\n"
        f"Program = lambda: Planted({name!r}, {calls})\n"
        + ("" if fault.again is None else f"again = lambda: planted_faults.again({name!r}, inputs())\n")
    )
    environment = {
        VARIABLE: name,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "GRADSPLIT_CACHE": str(folder / "cache"),
    }
    begin = time.monotonic()
    command = ["-m", "gradsplit.minimize", str(file), "--after", after]
    try:
        run = run_forked(command, ROOT, LIMIT_S, **environment)
    except subprocess.TimeoutExpired as late:
        return Found(0, False, time.monotonic() - begin, str(late.stdout))
    seconds = time.monotonic() - begin
    small = folder / "minimized" / "repro.py"
    if run.returncode != 0 or not small.exists():
        return Found(0, False, seconds, run.stdout + run.stderr)
    left = re.search(r"^(\d+) calls that fail", run.stdout, re.MULTILINE)
    assert left is not None, run.stdout
    try:
        again = run_forked([str(small)], ROOT, 120, **environment)
        fails_alone = again.returncode != 0
        if not fails_alone:
            return Found(int(left[1]), False, seconds, f"{run.stdout}alone: {again.stdout}{again.stderr}")
    except subprocess.TimeoutExpired:
        fails_alone = "hangs" in run.stdout
    return Found(int(left[1]), fails_alone, seconds, run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("calls", type=int, nargs="?", default=200)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=1, help="faults at a time")
    arguments = parser.parse_args()

    def find(name: str) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            found = minimized(name, arguments.calls, Path(folder))
        print(name, found, flush=True)
        return found

    names = arguments.names or [*FAULTS]
    with ThreadPoolExecutor(arguments.workers) as pool:
        results = [*pool.map(find, names)]
    table = Table("fault", "calls left", "fails alone", "seconds")
    for name, found in zip(names, results, strict=True):
        table.add_row(name, str(found.calls), str(found.fails_alone), f"{found.seconds:.0f}")
    Console(width=120).print(table)
    good = sum(found.fails_alone and 0 < found.calls <= 5 and found.seconds <= 120 for found in results)
    print(f"{good} of {len(names)} faults of {arguments.calls} calls are at most 5 calls within 120 s")


if __name__ == "__main__":
    main()
