"""``gradsplit.doctor``: verdicts, and two of the programs of ``doctor_programs.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsplit.compile_core.minimizer.outcome import Outcome
from gradsplit.doctor import DDP, Program, climb, load, verdict
from tests.observe.doctor_programs import EXPECTED, examine, is_right


def _equal(step: float, plain: float = 0.01) -> Outcome:
    return Outcome("equal", figures={"first": 1.0, "step": step, "plain": plain})


def test_the_first_rung_with_trouble_is_named():
    found = {
        "plain": _equal(0.01),
        "eager": _equal(0.01),
        "aot_eager": Outcome("differs", "result 0", "the result 0"),
    }
    assert verdict(found).startswith("aot_eager: the program differs: the result 0. Next: the joint trace")
    found["aot_eager"] = _equal(0.012)
    found["triton"] = _equal(0.02)
    assert verdict(found).startswith("aot_eager: a step takes 1.20 times as long as plain PyTorch's")
    found["triton"] = _equal(0.005)
    assert verdict(found) == "all rungs agree; a step of triton takes 0.50 of plain PyTorch's"
    found[DDP] = _equal(0.02)
    assert verdict({**found, "aot_eager": _equal(0.01)}).startswith(
        f"{DDP}: a step takes 2.00 times as long as stock"
    )


def test_what_is_no_program(tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text("number = 3\ndef factory():\n    return 5\n")
    with pytest.raises(ValueError, match="is not FILE:FACTORY with a file that is there"):
        load("nowhere.py:factory")
    with pytest.raises(ValueError, match="has no function number"):
        load(f"{file}:number")
    with pytest.raises(TypeError, match="the factory returns a function or module"):
        load(f"{file}:factory")
    with pytest.raises(TypeError, match="arguments are a tuple"):
        Program.of((print, 5))


def test_a_program_that_fails_plainly_climbs_no_further(tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text("import os\ndef factory():\n    return lambda: os.abort()\n")
    found = climb(f"{file}:factory")
    assert [*found] == ["plain"] and found["plain"].is_like(Outcome("crashes", "SIGABRT"))


@pytest.mark.multi_process
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ["pass absent_gradients raises", "gradients are not averaged"])
def test_a_planted_trouble_is_found(name: str):
    assert name in EXPECTED
    said = examine(name)
    assert is_right(name, said), said
