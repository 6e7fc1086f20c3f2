"""Starts a program on several ranks as a user would, and waits for it."""

from __future__ import annotations

import os
import socket
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
    return subprocess.run(
        [sys.executable, "-m", "gradsplit.launch", "--nproc-per-node", str(processes), *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def rank_environment(rank: int, processes: int, port: str) -> dict[str, str]:
    """The variables by which a rank without a launcher knows its job on this machine; ``port`` is the store's."""
    return {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
    }


def python_path() -> str:
    """What a process needs to find this checkout first."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
