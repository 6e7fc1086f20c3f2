"""A guard-hit call costs no more than torch.compile's: the bench says so itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("guard_cost.py")


@pytest.mark.timeout(600)
def test_a_guard_hit_costs_no_more_than_that_of_torch_compile():
    path = os.pathsep.join([str(BENCH.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(BENCH), "--rounds", "5", "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
