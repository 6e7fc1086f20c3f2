"""From Triton source to functions that launch kernels. The only file that imports Triton.

Kernels are compiled ahead of their first call and launched through the compiled kernel's own launcher:
Triton's ``kernel[grid](...)`` looks at every argument to choose a specialisation, and takes ten times as
long. What it would choose is known here: all arguments are pointers, and torch aligns what it allocates to 16
bytes. A call with an address that is not so aligned (a slice of the caller's) goes to a second kernel,
compiled when it first happens.

Triton reads a function's source from its file, so modules are written to the cache folder. What it compiles
goes to Triton's own cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compile_core.errors import CompileError
from compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from compile_core.toolchain.disk_cache import DiskCache, content_key


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

_MODULE = "kernel.py"
# Eager rounds a product before it adds.
_OPTIONS = {"enable_fp_fusion": False}

# Everything of a source but its name -> launcher. The text alone is not the kernel: Triton's types are in ``pointers``.
_loaded: dict[KernelSource, Callable[..., None]] = {}
# Text -> jit function, under the name that the text was first seen with.
_functions: dict[str, Any] = {}


def build_triton(sources: Sequence[KernelSource], cache_folder: Path) -> dict[str, Callable[..., None]]:
    """Compiles kernels, or finds them in the caches, and loads them onto their devices.

    Args:
        sources: Triton kernels with distinct names.
        cache_folder: where modules are kept.

    Returns:
        For each name a function of the kernel's buffers, in order: tensors, or addresses as integers, the
        quicker way. It launches the kernel on the current stream of the kernel's device, whichever device is
        current.

    Raises:
        CompileError: Triton is not installed, or fails.
    """
    functions = {}
    for source in sources:
        key = replace(source, name="", buffers=())
        if key not in _loaded:
            _loaded[key] = _launcher(source, cache_folder)
        functions[source.name] = _loaded[key]
    return functions


def compile_triton_for(source: KernelSource, target: Any, cache_folder: Path, is_aligned: bool = True) -> Any:
    """Compiles a kernel for a GPU that need not be there.

    Args:
        source: a Triton kernel.
        target: a ``GPUTarget`` such as ``GPUTarget("cuda", 90, 32)``.
        cache_folder: where its module is kept.
        is_aligned: whether all addresses are multiples of 16.

    Returns:
        Triton's ``CompiledKernel``.

    Raises:
        CompileError: Triton is not installed, or fails.
    """
    function = triton_function(source, cache_folder)
    names = function.arg_names
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(names))} if is_aligned else {}
    unit = triton.compiler.ASTSource(function, dict(zip(names, source.pointers, strict=True)), {}, attributes)
    try:
        return triton.compile(unit, target=target, options={**dict(source.meta), **_OPTIONS})
    except Exception as error:
        raise CompileError(
            f"Triton failed on the kernel {source.name}: {error}\n"
            f"The source is in {_path(source, cache_folder)}."
        ) from error


def triton_function(source: KernelSource, cache_folder: Path) -> Any:
    """The kernel as a ``triton.jit`` function, imported from a file.

    Raises:
        CompileError: Triton is not installed.
    """
    if triton is None:
        raise CompileError(
            "Compiling for a GPU needs Triton, which is not installed. Install the triton package, or choose "
            'backend="aot_eager".'
        )
    if source.text not in _functions:
        path = _path(source, cache_folder)
        spec = importlib.util.spec_from_file_location(f"gradsplit_triton_{path.parent.name}", path)
        if spec is None or spec.loader is None:
            raise CompileError(f"cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _functions[source.text] = getattr(module, _symbol(source))
    return _functions[source.text]


def gpu_target(kind: str, architecture: int, warp_size: int) -> Any:
    """A ``GPUTarget``, for ``compile_triton_for``."""
    return triton.backends.compiler.GPUTarget(kind, architecture, warp_size)


def _path(source: KernelSource, cache_folder: Path) -> Path:
    text = _module_text(source)
    key = content_key("triton module", text)
    with DiskCache(cache_folder).entry(key, lambda folder: _write(folder / _MODULE, text)) as folder:
        return folder / _MODULE


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _module_text(source: KernelSource) -> str:
    return f"{_prelude()}\n\n{source.text.replace(KERNEL_SYMBOL, _symbol(source))}\n"


def _symbol(source: KernelSource) -> str:
    """What a profiler shows."""
    return "gs_" + "".join(letter if letter.isalnum() else "_" for letter in source.name)


@cache
def _prelude() -> str:
    return Path(__file__).with_name("codegen_triton_prelude.py.in").read_text()


def _launcher(source: KernelSource, cache_folder: Path) -> Callable[..., None]:
    """A function of the kernel's addresses that launches it."""
    if 0 in source.grid:
        return _nothing
    device = source.device if source.device.index is not None else torch.device("cuda", 0)
    stream_of, device_of_thread = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    index = device.index
    grid_x, grid_y, grid_z = source.grid
    kernels: dict[bool, Any] = {}

    def loaded(is_aligned: bool) -> Any:
        if is_aligned not in kernels:
            target = triton.runtime.driver.active.get_current_target()
            kernel = compile_triton_for(source, target, cache_folder, is_aligned)
            kernel._init_handles()
            kernels[is_aligned] = kernel
        return kernels[is_aligned]

    with torch.cuda.device(device):
        aligned = loaded(True)
    run, function, packed = aligned.run, aligned.function, aligned.packed_metadata

    def launch(*buffers: Any) -> None:
        combined = 0
        for buffer in buffers:
            if type(buffer) is not int:
                return launch(*(b if type(b) is int else b.data_ptr() for b in buffers))
            combined |= buffer
        if combined & 15 or device_of_thread() != index:
            return launch_with_care(combined & 15 == 0, buffers)
        run(grid_x, grid_y, grid_z, stream_of(index), function, packed, None, None, None, *buffers)
        return None

    def launch_with_care(is_aligned: bool, addresses: Sequence[int]) -> None:
        with torch.cuda.device(device):
            kernel = loaded(is_aligned)
            stream = stream_of(index)
            kernel.run(
                *source.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *addresses
            )

    return launch


def _nothing(*buffers: Any) -> None:
    """Launches a kernel over no elements."""
