"""Pipelines on two ranks train as the unsplit model does, bit for bit; `make pipelines` runs real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.start_ranks import start_ranks


def test_stages_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """With one and with two stages a rank, in a V, and with weight gradients apart from input gradients and not."""
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", str(tmp_path), "tied", "--"]
    found = start_ranks([*program, "1F1B", "InterleavedZeroBubble", "DualPipeV"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.endswith(": equal")]
    assert len(lines) == 4, found.stdout


@pytest.mark.parametrize(
    ("models", "schedules", "count"),
    [(["tied"], ["InterleavedZeroBubble", "ZBVZeroBubble"], 3), (["t5_of_two_lengths"], ["1F1B"], 1)],
)
def test_stages_train_with_other_sizes_in_each_step(
    models: list[str], schedules: list[str], count: int, tmp_path: Path
) -> None:
    """And are compiled once."""
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--open", str(tmp_path), *models, "--"]
    found = start_ranks([*program, *schedules], timeout_s=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == count, found.stdout


def test_recorded_stages_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """With several microbatches in flight, dropout, running statistics, weight gradients apart, and messages without
    tags."""
    program = [
        "-m",
        "tests.distributed.pipeline.pipeline_cases",
        "--lanes",
        "--recorded",
        str(tmp_path),
        "tied",
        "--",
    ]
    found = start_ranks([*program, "1F1B", "InterleavedZeroBubble", "DualPipeV"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 4, found.stdout


def test_there_are_recordings_for_each_size(tmp_path: Path) -> None:
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--recorded", "--open", str(tmp_path)]
    found = start_ranks([*program, "tied", "--", "ZBVZeroBubble"], timeout_s=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 1, found.stdout


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [[], ["--recorded"], ["--open"], ["--recorded", "--open"]])
def test_stages_on_gpus_train_as_the_whole_model_does(tmp_path: Path, how: list[str]) -> None:
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", "--cuda", *how, str(tmp_path)]
    program += ["chain", "tied"]
    schedules = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    found = start_ranks([*program, "--", *schedules], timeout_s=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 8, found.stdout


def test_replicas_average_and_errors_come_on_every_rank(tmp_path: Path) -> None:
    program = ["-m", "tests.distributed.pipeline.replica_cases", str(tmp_path)]
    found = start_ranks(program, timeout_s=110, processes=4)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(": equal") == 4, found.stdout
