"""``bucketing.simulate`` predicts a step on two GPUs to 15%, under plans that differ much: the bench says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.start_ranks import start_ranks

BENCH = Path(__file__).with_name("ddp_prediction.py")


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.xdist_group("ddp_prediction")  # timed: run by no other at once, and best in a call of their own
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize("sockets", [False, True])
def test_steps_take_as_long_as_predicted(sockets: bool) -> None:
    over_sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    program = [str(BENCH), "--models", "gpt2", "--check"]
    done = start_ranks(program, 280, 2, **(over_sockets if sockets else {}))
    assert done.returncode == 0, done.stdout + done.stderr
