"""A job on two machines, of which one fails; the program runs more kinds of failures, in any number."""

import subprocess
import sys

import pytest

pytest.importorskip("mpi4py")

from tests.launch.machines import can_be_imitated
from tests.launch.several_machines import ROOT

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(
        not can_be_imitated(), reason="this system gives us no namespaces to imitate machines with"
    ),
]


@pytest.mark.parametrize("kind", ["exit", "machine ended", "machine lost"])
def test_a_job_ends_with_what_failed(kind):
    command = [sys.executable, "-m", "tests.launch.several_machines", "1", "0", kind]
    job = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert job.returncode == 0, job.stdout + job.stderr
