"""Models under FSDP2 train as without compilation: all of them in one launch of two ranks."""

from __future__ import annotations

import pytest

from tests.forked_ranks import fork_ranks


@pytest.mark.multi_process
@pytest.mark.timeout(240)
def test_sharded_models_train_alike() -> None:
    run = fork_ranks(["-m", "tests.multi_process.fully_shard_cases"], timeout_s=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("trains alike") == 8
