"""Compiled DDP beside stock DDP, two ranks on the CPU; the cases themselves are in ``ddp_cases.py``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
CASES = [
    node.name
    for node in ast.parse((FOLDER / "ddp_cases.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "case" for mark in node.decorator_list)
]


def run_cases(folder: Path, device: str) -> list[dict[str, str]]:
    """For each rank: what became of each case, "" if all went well."""
    program = [str(FOLDER / "ddp_cases.py"), str(folder), device]
    run = subprocess.run(
        [sys.executable, "-m", "launch", "--nproc-per-node", "2", *program],
        cwd=FOLDER.parents[1],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases(tmp_path_factory.mktemp("ddp"), "cpu")


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks")
    return run_cases(tmp_path_factory.mktemp("ddp"), "cuda")


@pytest.mark.multi_process
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ddp")  # one worker runs the ranks once for all cases
@pytest.mark.parametrize("case", CASES)
def test_ddp(case: str, on_cpu: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(on_cpu):
        assert not outcome[case], f"rank {rank}: {outcome[case]}"


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ddp_gpu")
@pytest.mark.parametrize("case", CASES)
def test_ddp_on_gpus(case: str, on_gpus: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(on_gpus):
        assert not outcome[case], f"rank {rank}: {outcome[case]}"
