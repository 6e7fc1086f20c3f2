"""From C++ source to functions that Python calls.

Kernels of a program are compiled in a few translation units, in parallel, by the C++ compiler on the user's
machine. Each becomes a builtin function of Python (see ``toolchain.cpp_compiler``); tensors are asked for their
addresses in C.

The OpenMP runtime is the one that torch has loaded already: the object is linked against that very file, so
that there is one pool of threads and ``torch.set_num_threads`` rules over both.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from compile_core.toolchain.cpp_compiler import builtin_function, compiler, run_compiler
from compile_core.toolchain.disk_cache import DiskCache, content_key

_KERNELS_PER_UNIT = 12
_SOURCE = "kernels.cpp"
_OBJECT = "kernels.so"

_FLAGS = (
    # Not 17, whose lambdas are constexpr: g++ 12 crashes when it folds one with an OpenMP loop inside.
    "-std=gnu++14",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    # Neither flag changes a value: errno and floating-point traps are not looked at.
    "-fno-math-errno",
    "-fno-trapping-math",
    # Eager rounds a product before it adds; polynomials ask for fused operations where they want them.
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-threadsafe-statics",
    "-w",
)

# Text of a kernel -> its function. Kernels of one process that are the same text are the same function.
_loaded: dict[str, Callable[..., None]] = {}


def build_cpp(sources: Sequence[KernelSource], cache_folder: Path) -> dict[str, Callable[..., None]]:
    """Compiles kernels, or finds them in the cache, and loads them.

    Args:
        sources: C++ kernels with distinct names.
        cache_folder: where results are kept for the next time.

    Returns:
        For each name a function of the kernel's buffers, in order: CPU tensors, or addresses as integers. It
        returns ``None`` and raises ``IndexError`` if a gathered index was out of range.

    Raises:
        CompileError: no working compiler.
    """
    missing = list(dict.fromkeys(source.text for source in sources if source.text not in _loaded))
    labels = {source.text: source.name for source in reversed(sources)}
    # Sorted, so that the same kernels make the same units in whichever order a program uses them.
    missing.sort(key=content_key)
    units = [missing[i : i + _KERNELS_PER_UNIT] for i in range(0, len(missing), _KERNELS_PER_UNIT)]
    if units:
        disk = DiskCache(cache_folder)
        with ThreadPoolExecutor(max_workers=min(len(units), os.cpu_count() or 1)) as pool:
            for functions in pool.map(lambda unit: _load_unit(unit, labels, disk), units):
                _loaded.update(functions)
    return {source.name: _loaded[source.text] for source in sources}


def _load_unit(
    texts: Sequence[str], labels: Mapping[str, str], disk: DiskCache
) -> dict[str, Callable[..., None]]:
    symbols = {text: f"gs_{content_key(text)[:16]}" for text in texts}
    # The label is for people who look at a profile; it is not part of the kernel's identity.
    parts = [_prelude(), *(f"// {labels[t]}\n{t.replace(KERNEL_SYMBOL, symbols[t])}" for t in texts)]
    source = "\n\n".join(parts) + "\n"
    identity = "\n".join(sorted(texts))
    key = content_key("cpp", _prelude(), identity, compiler_identity(), " ".join(_all_flags()), sys.version)
    with disk.entry(key, lambda folder: _compile(source, folder, disk.folder, key)) as folder:
        library = ctypes.CDLL(str(folder / _OBJECT))
    return {text: builtin_function(library, symbol) for text, symbol in symbols.items()}


def _compile(source: str, folder: Path, cache_folder: Path, key: str) -> None:
    (folder / _SOURCE).write_text(source)
    # Two steps: given -fopenmp, the linker would take the compiler's runtime beside the one of torch.
    runtime = openmp_runtime() or "-fopenmp"
    kept = cache_folder / "failed" / f"{key}.cpp"
    run_compiler([*_all_flags(), "-c", _SOURCE, "-o", "kernels.o"], folder, kept, source)
    run_compiler(["-shared", "kernels.o", runtime, "-o", _OBJECT], folder, kept, source)
    (folder / "kernels.o").unlink(missing_ok=True)


@cache
def _prelude() -> str:
    return Path(__file__).with_name("codegen_cpp_prelude.h").read_text()


@cache
def compiler_identity() -> str:
    """Compiler and machine, as far as an object compiled for this very machine depends on them."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    return "\n".join((version, platform.machine(), _cpu_features(), str(openmp_runtime()), torch.__version__))


def _cpu_features() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = dict(re.findall(r"^(vendor_id|cpu family|model|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE))
    return "\n".join(f"{name}: {value}" for name, value in sorted(lines.items()))


@cache
def _all_flags() -> tuple[str, ...]:
    # g++ prefers 256-bit vectors on most machines that have 512-bit ones; elementary functions gain a factor
    # of 1.8.
    wide = ("-mprefer-vector-width=512",) if " avx512f " in f"{_cpu_features()} " else ()
    return (*_FLAGS, *wide)


@cache
def openmp_runtime() -> str | None:
    """The file of the OpenMP runtime in this process, or ``None`` for the compiler's own."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"\s(/\S*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*)$", mapped, re.MULTILINE)
    return found.group(1) if found else None
