"""Starts a program on several ranks as a user would, and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start_ranks(
    program: list[str], timeout_s: float, processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m gradsplit.launch`` on a program and its arguments, with this checkout first on the path.

    Args:
        environment: variables beside those of this process.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "gradsplit.launch", "--nproc-per-node", str(processes), *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
