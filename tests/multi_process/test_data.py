"""Graphs with data in them that exchange data with other ranks."""

from __future__ import annotations

import pytest

from tests.forked_ranks import fork_ranks


@pytest.mark.multi_process
def test_no_collective_is_done_twice_on_one_rank() -> None:
    run = fork_ranks(["-m", "tests.multi_process.data_cases"], timeout_s=100)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("as plain") == 12 and run.stdout.count("told") == 6
