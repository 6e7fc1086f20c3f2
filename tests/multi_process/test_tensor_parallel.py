"""Models that are spread over ranks as DTensors are one graph each."""

from __future__ import annotations

import pytest

from tests.forked_ranks import fork_ranks
from tests.start_ranks import start_ranks


@pytest.mark.multi_process
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensor_parallel_models_train_as_plain_ones(device: str) -> None:
    start = fork_ranks if device == "cpu" else start_ranks
    run = start(["-m", "tests.multi_process.tensor_parallel_cases", device], timeout_s=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("alike") == 30
