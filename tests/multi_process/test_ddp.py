"""Compiled DDP beside stock DDP on several ranks; the cases themselves are in ``ddp_cases/``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.forked_ranks import fork_ranks
from tests.multi_process.run_ddp_cases import load_cases
from tests.start_ranks import start_ranks

LIMIT_S = 1200
CPU_CASES, GPU_CASES = load_cases("cpu"), load_cases("cuda")


def run_cases(
    request: pytest.FixtureRequest, folder: Path, device: str, processes: int
) -> list[dict[str, str]]:
    """For each rank: what became of each case that this run of pytest selects, "" if all went well."""
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and request.fixturename in item.fixturenames
    ]
    program = ["-m", "tests.multi_process.run_ddp_cases", str(folder), *wanted]
    timeout_s = LIMIT_S - 60  # a busy machine with two cores has needed twice the quiet one's 260 s
    if device == "cpu":
        # torch's PowerSGD hook synchronises a GPU where there is one, whatever its tensors are on
        run = fork_ranks(program, timeout_s, processes, DDP_CASES_DEVICE=device, CUDA_VISIBLE_DEVICES="")
    else:
        run = start_ranks(program, timeout_s, processes, DDP_CASES_DEVICE=device)
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    print(run.stdout)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases(request, tmp_path_factory.mktemp("ddp"), "cpu", 2)


@pytest.fixture(scope="module")
def on_gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    processes = torch.cuda.device_count()
    if processes < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and there is {processes}")
    return run_cases(request, tmp_path_factory.mktemp("ddp"), "cuda", processes)


@pytest.mark.multi_process
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.xdist_group("ddp")  # one worker runs the ranks once for all cases
@pytest.mark.parametrize("case", CPU_CASES)
def test_ddp(case: str, on_cpu: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(on_cpu):
        assert not outcome[case], f"rank {rank}: {outcome[case]}"


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.xdist_group("ddp_gpu")
@pytest.mark.parametrize("case", GPU_CASES)
def test_ddp_on_gpus(case: str, on_gpus: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(on_gpus):
        assert not outcome[case], f"rank {rank}: {outcome[case]}"
