"""Tests in Triton's interpreter, in a process of its own: the environment chooses it when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def check_interpreted(*names: str) -> None:
    """Runs the tests of ``tests/lowering/<name>.py``, which must all pass."""
    pytest.importorskip("triton")
    files = [f"tests/lowering/{name}.py" for name in names]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
         "--import-mode=importlib", "-o", "pythonpath=.", "-o", "addopts=", *files],
        cwd=_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
