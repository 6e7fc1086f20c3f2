"""A generated Triton kernel as the function that Triton's interpreter takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compile_core.ir.kernels import KernelSource
from compile_core.lowering.build_triton import write_module
from compile_core.lowering.triton_compiler import import_function
from compile_core.toolchain.disk_cache import content_key


def jit_function(source: KernelSource, folder: Path) -> Any:
    """Imports the kernel from a module that it writes into ``folder``."""
    path = folder / content_key(source.name, source.text) / "kernel.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    return import_function(path, write_module(source, path))
