"""Compiled DDP beside stock DDP, two ranks on the CPU; the cases themselves are in ``ddp_cases.py``."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CASES = [
    node.name
    for node in ast.parse((FOLDER / "ddp_cases.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "case" for mark in node.decorator_list)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each rank: what became of each case, "" if all went well."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "launch", "--nproc-per-node", "2", str(FOLDER / "ddp_cases.py"), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.multi_process
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ddp")  # one worker runs the ranks once for all cases
@pytest.mark.parametrize("case", CASES)
def test_ddp(case: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[case], f"rank {rank}: {outcome[case]}"
