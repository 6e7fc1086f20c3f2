"""Models that are spread over ranks as DTensors are one graph each."""

from __future__ import annotations

import pytest

from tests.forked_ranks import fork_ranks


@pytest.mark.multi_process
def test_tensor_parallel_models_train_as_plain_ones() -> None:
    run = fork_ranks(["-m", "tests.multi_process.tensor_parallel_cases"], timeout_s=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("alike") == 30
