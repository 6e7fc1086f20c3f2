"""Processes end well while recorded backwards live, whether or not they leave their process group before."""

from __future__ import annotations

import pytest
import torch

from tests.start_ranks import start_ranks


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_ranks_end(how: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and there is {torch.cuda.device_count()}")
    program = ["-m", "tests.multi_process.exit_with_cuda_graphs", how]
    run = start_ranks(program, timeout_s=100)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
