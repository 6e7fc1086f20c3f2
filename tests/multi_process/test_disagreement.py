"""Ranks that disagree end with an error that names the rank, quickly, instead of hanging or adding wrong numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "another_graph",
            ["rank 0 got: rank 1 planned other gradient buckets", "rank 1 got: rank 1 planned other"],
        ),
        ("does_not_come", ["rank 0 got: rank 1 did not agree on a gradient plan within 5 s"]),
        (
            "compilation_fails",
            ["rank 0 got: compilation failed on rank 1: InternalError: a fault on this rank"],
        ),
    ],
)
def test_ranks_that_disagree(case: str, expected: list[str]) -> None:
    start_s = time.monotonic()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "launch",
            "--nproc-per-node",
            "2",
            str(FOLDER / "disagreement_cases.py"),
            case,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert time.monotonic() - start_s < 25
    for line in expected:
        assert line in run.stdout, run.stdout + run.stderr
