"""A handful of the cases of ``rank_failures.py``, with short times; ``make rank-failures`` tries all."""

from __future__ import annotations

import pytest

from tests.multi_process.rank_failures import Case, run


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("rank_failures")
@pytest.mark.parametrize(
    "name",
    [
        "killed-capture-4-2",
        "killed-compile-2-0",
        "killed-backward-2-1-reducer",
        "raises-step-2-1",
        "stopped-backward-2-1-reducer-14-3",
        "stopped-forward-2-0-in_graph-14-3",
        "slow-compile-2-1-in_graph-6-3",
        "skips-destroys_slowly-2-1",
    ],
)
def test_others_name_a_rank_that_fails_or_go_on(name: str) -> None:
    assert not run(Case.of(name))
