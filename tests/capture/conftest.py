"""What the tests of capture share."""

from __future__ import annotations

import pytest

from gradsplit.compile_core.guard_checks import check
from gradsplit.compile_core.guard_checks.guard_interpreter import guard_interpreter


@pytest.fixture(params=["interpreted", "python"])
def guard_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which form of the guard check is in use."""
    if request.param == "python":
        monkeypatch.setattr(check, "guard_interpreter", lambda: None)
    else:
        assert guard_interpreter() is not None, "this machine has a compiler, so the interpreter must load"
    return request.param
