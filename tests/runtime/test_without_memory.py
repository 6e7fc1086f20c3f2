"""Where memory ends, the interpreters raise a MemoryError."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, View
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from tests.runtime.test_link_program import spec, whole

ROOT = Path(__file__).parent.parent.parent


def test_each_allocation_that_fails():
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.runtime.without_memory"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    failures = dict(line.split() for line in shown.stdout.splitlines())
    assert len(failures) == 3 and all(int(count) >= 3 for count in failures.values()), failures


def test_a_view_that_torch_cannot_make(monkeypatch: pytest.MonkeyPatch):
    interpreter = region_interpreter()
    assert interpreter is not None
    fails = ctypes.CFUNCTYPE(
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    )(lambda *arguments: 1)
    call = ExternCall(torch.ops.aten.add.out, (whole("x", 4), 1), {}, (), {"out": whole("y", 4)})
    outputs = (View("y", (2, 2), (2, 1)),)
    run = link_program(
        LoopProgram("test", ("x",), (), dict.fromkeys("xy", spec(4)), {}, (call,), outputs), [], {}
    )
    place = ctypes.c_void_p.in_dll(interpreter._library, "gs_view")
    monkeypatch.setattr(place, "value", ctypes.cast(fails, ctypes.c_void_p).value)
    with pytest.raises(MemoryError, match="view"):
        run([torch.ones(4)])
