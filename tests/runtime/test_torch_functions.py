"""The types by which native code calls torch's functions are those that torch's headers declare."""

from __future__ import annotations

import subprocess
from itertools import chain
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.guard_checks import guard_interpreter
from gradsplit.compile_core.runtime import native_operators, region_interpreter
from gradsplit.compile_core.toolchain import torch_library
from gradsplit.compile_core.toolchain.cpp_compiler import compiler

INCLUDE = Path(torch.__file__).parent / "include"
SHIMS = "torch/csrc/inductor/aoti_torch"
OPCODES = {
    guard_interpreter: torch_library.cpp_enum(guard_interpreter.GuardOpcode),
    region_interpreter: region_interpreter.OPCODES,
}


def operator_types() -> list[tuple[str, str]]:
    """Each operator's function, and the type that the interpreter calls it by."""
    found = []
    for operator, (name, wanted) in native_operators._FUNCTIONS.items():
        kinds = ", ".join(kind.name for kind in chain(*native_operators._kinds_of(operator, wanted)))
        devices = ("cuda",) if operator is torch.ops.aten.mm.dtype_out else ("cpu", "cuda")  # GPUs' alone
        found += [(f"aoti_torch_{device}_{name}", f"Signature<{kinds}>::Function") for device in devices]
    return found


@pytest.mark.parametrize("interpreter", OPCODES)
def test_types(interpreter, tmp_path: Path):
    types = [(symbol, f"decltype({name})") for name, symbol in interpreter._TORCH_SYMBOLS.items()]
    if interpreter is region_interpreter:
        types += operator_types()
    headers = ("c/shim.h", "generated/c_shim_cpu.h", "generated/c_shim_cuda.h")
    text = "".join(f"#include <{SHIMS}/{header}>\n" for header in headers) + "#include <type_traits>\n"
    text += interpreter._SOURCE.read_text()
    checks = [
        f"static_assert(std::is_same_v<decltype(&{symbol}), {type}>);\n"
        for symbol, type in types
        if symbol.startswith("aoti_")
    ]
    assert len(checks) > 3
    (tmp_path / "opcodes.h").write_text(OPCODES[interpreter])
    (tmp_path / "python_objects.h").write_text(torch_library._HEADER.read_text())
    (tmp_path / "checked.cpp").write_text(text + "".join(checks))
    flags = ("-std=gnu++20", "-fsyntax-only", "-w", f"-I{INCLUDE}", "checked.cpp")
    built = subprocess.run([*compiler(), *flags], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
