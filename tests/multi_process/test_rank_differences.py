"""Ranks whose forwards differ train as under stock DDP, and what cannot be averaged is named on every rank; the cases
are in ``rank_differences.py``."""

from __future__ import annotations

import json

import pytest
import torch

from tests.forked_ranks import fork_ranks
from tests.multi_process.rank_differences import KINDS, NOT_WAITED_FOR, REFUSED
from tests.start_ranks import start_ranks

Outcomes = list[dict[str, str]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and there is {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("rank_differences")
    program = ["-m", "tests.multi_process.rank_differences", str(folder)]
    start = fork_ranks if request.param == "cpu" else start_ranks
    run = start(program, timeout_s=200, DDP_CASES_DEVICE=request.param)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("rank_differences")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_train_as_under_stock_ddp(kind: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[kind], f"rank {rank}: {outcome[kind]}"


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("rank_differences")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_averaged_is_named_on_every_rank(kind: str, outcomes: Outcomes) -> None:
    if ("cuda", kind) in NOT_WAITED_FOR and kind not in outcomes[0]:
        pytest.skip("over NCCL the host of the other rank does not wait in its backward")
    for rank, outcome in enumerate(outcomes):
        assert not outcome[kind], f"rank {rank}: {outcome[kind]}"
