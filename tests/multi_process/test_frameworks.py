"""Accelerate and the Trainer of transformers train compiled models as they train plain ones, on two ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tests.forked_ranks import fork_ranks

INSTALLED = any(
    point.name == "gradsplit" for point in importlib.metadata.entry_points(group="torch_dynamo_backends")
)


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.skipif(not INSTALLED, reason="torch knows the backend's name only where gradsplit is installed")
def test_frameworks_train_alike() -> None:
    run = fork_ranks(["-m", "tests.multi_process.framework_cases"], timeout_s=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("trains alike") == 12
