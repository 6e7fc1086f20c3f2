"""Pipelines on two ranks train as the unsplit model does, bit for bit; `make pipelines` runs all of them."""

from __future__ import annotations

from pathlib import Path

from tests.start_ranks import start_ranks


def test_stages_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """Skip connections, tied weights, dropout and batch normalisation, with separate programs and without."""
    program = ["-m", "tests.distributed.pipeline.pipeline_cases", str(tmp_path)]
    found = start_ranks([*program, "unet", "t5", "--", "1F1B", "ZBVZeroBubble"], timeout_s=600)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.endswith(": equal")]
    assert len(lines) == 4, found.stdout
