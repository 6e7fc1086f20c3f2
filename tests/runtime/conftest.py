"""What the tests of the runtime share."""

from __future__ import annotations

import pytest

from gradsplit.compile_core.runtime import link_program
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter


@pytest.fixture(params=["interpreted", "python"])
def region_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which form of a region runs."""
    if request.param == "python":
        monkeypatch.setattr(link_program, "region_interpreter", lambda: None)
    else:
        assert region_interpreter() is not None, "this machine has a compiler, so the interpreter must load"
    return request.param
