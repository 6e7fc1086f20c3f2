"""Pipelines on two ranks train as the unsplit model does, bit for bit; `make pipelines` runs real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.forked_ranks import fork_rank, fork_ranks
from tests.start_ranks import free_port, start_ranks


@pytest.mark.multi_process
def test_stages_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """With one and with two stages a rank, in a V, and with weight gradients apart from input gradients and not."""
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", str(tmp_path), "tied", "--"]
    found = fork_ranks([*program, "1F1B", "InterleavedZeroBubble", "DualPipeV"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.endswith(": equal")]
    assert len(lines) == 4, found.stdout


@pytest.mark.multi_process
def test_stages_train_with_other_sizes_in_each_step(tmp_path: Path) -> None:
    """And are compiled once."""
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--open", str(tmp_path), "tied", "--"]
    found = fork_ranks([*program, "InterleavedZeroBubble", "ZBVZeroBubble"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 3, found.stdout


@pytest.mark.multi_process
def test_recorded_stages_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """With several microbatches in flight, dropout, running statistics, weight gradients apart, and messages without
    tags that are read late."""
    program = [
        "-m",
        "tests.distributed.pipeline.pipeline_cases",
        "--lanes",
        "--late",
        "--recorded",
        str(tmp_path),
        "tied",
        "--",
    ]
    found = fork_ranks([*program, "1F1B", "InterleavedZeroBubble", "DualPipeV"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 4, found.stdout


@pytest.mark.multi_process
def test_there_are_recordings_for_each_size(tmp_path: Path) -> None:
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--recorded", "--open", str(tmp_path)]
    found = fork_ranks([*program, "tied", "--", "ZBVZeroBubble"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 1, found.stdout


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [[], ["--recorded"], ["--open"], ["--recorded", "--open"]])
def test_stages_on_gpus_train_as_the_whole_model_does(tmp_path: Path, how: list[str]) -> None:
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--cuda", *how, str(tmp_path)]
    program += ["chain", "tied"]
    schedules = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    found = start_ranks([*program, "--", *schedules], timeout_s=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 8, found.stdout


@pytest.mark.multi_process
def test_replicas_average_and_errors_come_on_every_rank(tmp_path: Path) -> None:
    program = ["-m", "tests.distributed.pipeline.replica_cases", str(tmp_path)]
    found = fork_ranks(program, timeout_s=110, processes=4)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 4, found.stdout


@pytest.mark.multi_process
@pytest.mark.parametrize(("sizes", "who"), [("open", 1), ("fixed", 0)])
def test_a_rank_that_is_killed_is_named(sizes: str, who: int, tmp_path: Path) -> None:
    program = ["-m", "tests.distributed.pipeline.killed_rank", str(tmp_path / "p"), sizes, str(who)]
    port = free_port()
    files = [tmp_path / f"said_{k}" for k in range(2)]
    ranks = [fork_rank(program, k, 2, port, files[k]) for k in range(2)]
    try:
        ranks[1 - who].wait(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = files[1 - who].read_text()
    assert f"rank {who}" in said.splitlines()[-1] and "has ended" in said.splitlines()[-1], said
