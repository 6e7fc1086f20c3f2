"""A few of the cases, with two processes; the program runs all of them."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.launch.test_launch_options import ROOT, environment

CASES = [
    "redirects and tee",
    "virtual local rank (PET_…)",
    "raises, recorded",
    "fails once",
    "no program",
    "together",
]


@pytest.mark.timeout(180)
def test_what_torchrun_does_is_done():
    command = [sys.executable, "-m", "tests.launch.compare_with_torchrun", "2", *CASES]
    compared = subprocess.run(
        command, check=False, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=170
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
