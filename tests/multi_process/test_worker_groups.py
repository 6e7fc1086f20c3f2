"""Cases that share a start of ranks are one worker's: where groups have no effect, every worker starts all of them."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("worker_groups")
def test_the_scheduler_knows_of_groups(request: pytest.FixtureRequest) -> None:
    # It sees what is appended to the names of tests, and nothing else.
    is_asked_for = request.config.getoption("loadgroup", default=False)
    assert not is_asked_for or request.node.nodeid.endswith("@worker_groups")
