"""Kernel sources in, callables out; whichever language they are in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from compile_core.ir.kernels import KernelSource
from compile_core.lowering.build_cpp import build_cpp


def build(sources: Sequence[KernelSource], cache_folder: Path) -> Mapping[str, Callable[..., None]]:
    """Compiles the kernels of a program.

    Args:
        sources: kernels with distinct names.
        cache_folder: where results are kept; processes may share it.

    Returns:
        A function for each kernel's name. Its arguments are the buffers of ``KernelSource.buffers``, in order, as
        tensors or as ``tensor.data_ptr()``.

    Raises:
        CompileError: a compiler is missing or failed.
    """
    cpp = [source for source in sources if source.language == "cpp"]
    return build_cpp(cpp, cache_folder)
