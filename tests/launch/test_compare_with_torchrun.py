"""A few of the cases, with two processes; the program runs all of them."""

import pytest

pytest.importorskip("torch")

from tests.launch.compare_with_torchrun import differences, observe


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["redirects and tee", "virtual local rank", "fails once", "no program"])
def test_what_torchrun_does_is_done(name):
    assert differences(name, observe("torchrun", name, 2), observe("ours", name, 2)) == []
