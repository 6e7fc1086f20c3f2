"""Triton itself: the one file that imports it. Run as a script it is a process that compiles what it is sent.

Such a process needs neither torch nor the rest of this package, so it starts in a fraction of a second. It reads a
request a line from its input and answers each with a line, both JSON; ``toolchain.compile_workers`` is the other end.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def _import_triton() -> Any:
    """Triton, or ``None`` where it is not installed: programs on CPU do without."""
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
    except ImportError:
        return None
    return triton


triton = _import_triton()

_IDLE_S = 60.0
# What is kept of what Triton makes; the other stages of its compilation are of no use later.
_KEPT = (".json", ".cubin", ".hsaco", ".ptx")


def gpu_target(kind: str, architecture: int, warp_size: int) -> Any:
    """A ``GPUTarget``."""
    return triton.backends.compiler.GPUTarget(kind, architecture, warp_size)


def import_function(path: Path, name: str) -> Any:
    """A ``triton.jit`` function of a module that lies in a file; Triton reads its source from there."""
    module = ModuleType(f"gradsplit_triton_{path.parent.name}")
    # Not by a loader, which leaves a folder beside it: what is built is kept on disk only if it is nothing but files.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return getattr(module, name)


def compile_into(request: Mapping[str, Any], folder: Path) -> None:
    """Compiles a kernel for a GPU that need not be there, and puts the result into a folder.

    Args:
        request: ``module`` (a path), ``function``, ``pointers`` (types of the arguments), ``is_aligned`` (whether all
            addresses are multiples of 16), ``target`` (arguments of ``gpu_target``), ``options`` of Triton's.
        folder: where the files go that ``load_kernel`` reads.
    """
    function = import_function(Path(request["module"]), request["function"])
    function.fn.__globals__["NVIDIA"] = triton.language.constexpr(request["target"][0] == "cuda")
    names, pointers = function.arg_names, request["pointers"]
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(names))}
    attributes = aligned if request["is_aligned"] else {}
    unit = triton.compiler.ASTSource(function, dict(zip(names, pointers, strict=True)), {}, attributes)
    # A folder of its own instead of Triton's cache, whose files nobody verifies.
    scratch = folder / "triton"
    os.environ["TRITON_CACHE_DIR"] = str(scratch)
    kernel = triton.compile(unit, target=gpu_target(*request["target"]), options=request["options"])
    for name, path in kernel.metadata_group.items():
        if name.endswith(_KEPT):
            shutil.copyfile(path, folder / name)
    shutil.rmtree(scratch)


def load_kernel(folder: Path, pointers: Sequence[str], manifest: str) -> Any:
    """Triton's ``CompiledKernel`` of what ``compile_into`` left in a folder, beside a file called ``manifest``."""
    files = {
        path.name: str(path) for path in folder.iterdir() if path.suffix in _KEPT and path.name != manifest
    }
    names = [f"p{index}" for index in range(len(pointers))]
    # All that a compiled kernel reads of its source; the function itself need not be imported again.
    source = SimpleNamespace(
        fn=SimpleNamespace(arg_names=names), signature=dict(zip(names, pointers, strict=True)), constants={}
    )
    return triton.compiler.CompiledKernel(source, files, folder.name)


def load_binary(kernel: Any, device_index: int) -> tuple[int, int]:
    """Loads a compiled kernel onto the current GPU; its handle, and how many threads a block of it may have."""
    loaded = triton.runtime.driver.active.utils.load_binary(
        kernel.name, kernel.kernel, kernel.metadata.shared, device_index
    )
    return loaded[1], loaded[4]


def _serve() -> None:
    # Triton prints to the output what it has to say about errors; the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while select.select([0], [], [], _IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        try:
            compile_into(request, Path(request["folder"]))
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{error}", "traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
