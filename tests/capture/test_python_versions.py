"""Every instruction that CPython 3.11 to 3.13 emits for a corpus of functions has a handler."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradsplit.compile_core.capture.code_objects.python_versions import HALVES
from gradsplit.compile_core.capture.frames.frame import OPCODES

HERE = Path(__file__).parent
CORPUS = [*sorted(HERE.glob("test_*.py")), HERE / "models.py"]

# Runs in another interpreter, without any package: names of the instructions of all functions in the files.
LISTER = """
import dis, json, sys
found = {}
def walk(code, name):
    if code.co_flags & 1:
        for instruction in dis.get_instructions(code):
            found.setdefault(instruction.opname, name)
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            walk(constant, constant.co_name)
for path in sys.argv[1:]:
    with open(path) as file:
        walk(compile(file.read(), path, "exec"), path)
print(json.dumps(found))
"""


def find_interpreter(version: str) -> str | None:
    """An interpreter of this version that runs: this one, on the path, or installed beside it."""
    if ".".join(map(str, sys.version_info[:2])) == version:
        return sys.executable
    found = shutil.which(f"python{version}")
    candidates = [] if found is None else [found]
    beside = Path(sys.base_prefix).parent
    candidates += map(str, sorted(beside.glob(f"{version}.*/bin/python")))
    for candidate in candidates:
        if subprocess.run([candidate, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_instruction_has_a_handler(version):
    interpreter = find_interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    listed = subprocess.run(
        [interpreter, "-I", "-c", LISTER, *map(str, CORPUS)], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0, listed.stderr
    found = json.loads(listed.stdout)
    missing = {name: where for name, where in found.items() if name not in (*OPCODES, *HALVES)}
    assert not missing
