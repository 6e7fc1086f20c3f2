"""Seconds until two processes run, under torchrun and under ours: ``python -m tests.launch.start_up [REPETITIONS]``.

It ends with 1 when ours takes a second longer than torchrun, by medians.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {"torchrun": "torch.distributed.run", "ours": "gradsplit.launch"}


def seconds_of(module: str) -> tuple[float, float]:
    """Return the seconds until the second of two processes ran its first line, and until all had ended."""
    program = "import os, time; os.write(1, b'%f\\n' % time.time())"  # In one piece, which is not torn.
    command = [
        sys.executable,
        "-m",
        module,
        "--nproc-per-node=2",
        "--no-python",
        sys.executable,
        "-c",
        program,
    ]
    start_s = time.time()
    job = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return max(map(float, job.stdout.split())) - start_s, time.time() - start_s


def main(repetitions: int = 7) -> int:
    took: dict[str, list[tuple[float, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(repetitions):
        for launcher, module in LAUNCHERS.items():
            took[launcher].append(seconds_of(module))
    medians = {}
    for launcher, pairs in took.items():
        started, ended = zip(*pairs, strict=True)
        medians[launcher] = statistics.median(started)
        each = " ".join(f"{seconds:.2f}" for seconds in started)
        total = statistics.median(ended)
        print(f"{launcher:8} started after {medians[launcher]:.2f} s, ended after {total:.2f} s ({each})")
    return 1 if medians["ours"] > medians["torchrun"] + 1.0 else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
