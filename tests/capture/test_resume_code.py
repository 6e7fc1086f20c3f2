"""Break code and resume code, under every supported Python: functions run one instruction at a time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bytecode
import pytest

from gradsplit.compile_core.capture.code_objects.instructions import decode
from gradsplit.compile_core.capture.code_objects.resume import NULL_PLACE, VALUE, Rest, make_break_code
from tests.capture.step_functions import FUNCTIONS, check
from tests.capture.test_python_versions import find_interpreter

HERE = Path(__file__).parent


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_instruction_can_end_a_graph(function):
    check(function)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_versions(version, tmp_path):
    interpreter = find_interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    # The package is pure Python, so that the other interpreter can import it.
    (tmp_path / "bytecode").symlink_to(Path(bytecode.__file__).parent)
    found = subprocess.run(
        [interpreter, "-B", str(HERE / "step_functions.py"), str(HERE.parents[1])],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"stepped {len(FUNCTIONS)}\n"


def test_a_break_takes_no_longer_in_a_long_function():
    names = {}
    for count in (10, 400):
        lines = ["    with manager():", *["        x = f(x)"] * count, "    return x"]
        exec("\n".join([f"def function_{count}(x):", *lines]), names)
    sizes = []
    for count in (10, 400):
        code = names[f"function_{count}"].__code__
        index = next(at for at, each in enumerate(decode(code).instructions) if each.name == "CALL")
        broken = make_break_code(Rest(code, index, (VALUE, NULL_PLACE, VALUE), ("x",)))
        sizes.append(len(broken.code.co_code))
    assert sizes[0] == sizes[1]
