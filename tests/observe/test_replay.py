"""``config.replay_record_enabled`` and ``replay``: a capture that fails is kept, and run alone by another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradsplit
from tests.forked_ranks import run_forked
from tests.start_ranks import python_path

_PROGRAM = """
import torch, gradsplit

gradsplit.config.replay_record_enabled = True
FACTOR = 3.0

class Model(torch.nn.Module):
    def forward(self, x):
        return branching(x * FACTOR)

def branching(x):
    if x.sum() > 0:
        return x + 1
    return x

for _ in range(2):
    try:
        gradsplit.compile(Model(), fullgraph=True)(torch.ones(2))
    except gradsplit.Unsupported:
        pass
print("the program has run")
"""


def _run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(command, cwd, PYTHONPATH=python_path())


@pytest.mark.multi_process
def test_a_failing_capture_of_a_program_is_replayed_alone(tmp_path: Path):
    pytest.importorskip("cloudpickle", reason="records are pickled with cloudpickle")
    (tmp_path / "train.py").write_text(_PROGRAM)
    ran = _run("train.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (record,) = (tmp_path / "gradsplit_repro").iterdir()
    assert ran.stderr.count(f"gradsplit.replay('gradsplit_repro/{record.name}') runs it alone") == 1
    again = _run("-c", f"import gradsplit; gradsplit.replay({str(record)!r})", cwd=tmp_path)
    assert "the program has run" not in again.stdout
    assert "gradsplit.compile_core.errors.Unsupported: [data-dependent-branch]" in again.stderr
    assert 'train.py", line 12, in branching\n    if x.sum() > 0:' in again.stderr


def test_a_bug_of_the_capture_behind_a_graph_break_is_replayed(tmp_path: Path, monkeypatch, caplog):
    pytest.importorskip("cloudpickle", reason="records are pickled with cloudpickle")
    from gradsplit.compile_core.capture.state import Capture

    monkeypatch.setenv("GRADSPLIT_REPRO_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    call_tensor_op = Capture.call_tensor_op

    def with_a_bug(self, op, target, args, kwargs):
        if target == "cos":
            raise ZeroDivisionError("a bug at cos")
        return call_tensor_op(self, op, target, args, kwargs)

    def closing(factor):
        def program(x, *more, key):
            y = x * factor + key
            gradsplit.graph_break()
            return y.cos() + len(more)

        return program

    with monkeypatch.context() as bug:
        bug.setattr(Capture, "call_tensor_op", with_a_bug)
        with gradsplit.config.patch(replay_record_enabled=True):
            found = gradsplit.compile(closing(2.0), backend="eager")(torch.ones(2), 1, key=1)
        assert torch.equal(found, torch.full((2,), 3.0).cos() + 1)
        (record,) = tmp_path.iterdir()
        with pytest.raises(ZeroDivisionError, match="a bug at cos"):
            gradsplit.replay(record)
    gradsplit.replay(record)  # the bug is mended


def test_what_cannot_be_recorded_is_said_and_changes_nothing(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("GRADSPLIT_REPRO_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with gradsplit.config.patch(replay_record_enabled=True), pytest.raises(gradsplit.Unsupported):
        gradsplit.compile(lambda x: print(x), fullgraph=True)(torch.ones(2))
    assert "is not recorded: ModuleNotFoundError" in caplog.text and not [*tmp_path.iterdir()]
    with pytest.raises(gradsplit.Unsupported):  # nothing is tried where nobody asks
        gradsplit.compile(lambda x: print(x, x), fullgraph=True)(torch.ones(2))
    assert caplog.text.count("is not recorded") == 1
