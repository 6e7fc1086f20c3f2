"""How kernels are compiled for this machine: the flags, the OpenMP runtime, and what an object depends on."""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.options import chosen_cpp_compiler
from gradsplit.compile_core.toolchain.cpp_compiler import compiler
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key

_VERSION = "version.txt"
_FLAGS = (
    # Not 17, whose lambdas are constexpr: g++ 12 crashes when it folds one with an OpenMP loop inside.
    "-std=gnu++14",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    # Neither flag changes a value where `of_any_function` is: errno and floating-point traps are not looked at.
    "-fno-math-errno",
    "-fno-trapping-math",
    # Eager rounds a product before it adds; polynomials ask for fused operations where they want them.
    "-ffp-contract=off",
    # Integers that overflow wrap, as in eager's kernels: the least one has no absolute value.
    "-fwrapv",
    "-fno-exceptions",
    "-fno-threadsafe-statics",
    "-w",
)


@cache
def compiler_version(cache_folder: Path) -> str:
    """What the C++ compiler says that it is; where there is none, what the last one said that compiled into this
    folder, since kernels that are kept need none.

    Raises:
        CompileError: there is none, and there was none.
    """
    disk = DiskCache(cache_folder)
    key = content_key("compiler", machine_identity(), *chosen_cpp_compiler())

    def last() -> str | None:
        with disk.find(key) as place:
            return None if place is None else (place / _VERSION).read_text()

    try:
        command = [*compiler(), "--version"]
    except CompileError:
        if (known := last()) is None:
            raise
        return known
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def write(place: Path) -> None:
        (place / _VERSION).write_text(version)

    if last() != version:
        disk.discard(key)
        with disk.entry(key, write):
            pass
    return version


@cache
def machine_identity() -> str:
    """The machine, as far as an object compiled for this very machine depends on it."""
    return "\n".join((platform.machine(), _cpu_features(), str(openmp_runtime()), torch.__version__))


def _cpu_features() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = dict(re.findall(r"^(vendor_id|cpu family|model|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE))
    return "\n".join(f"{name}: {value}" for name, value in sorted(lines.items()))


@cache
def kernel_flags() -> tuple[str, ...]:
    """What the compiler is given for every kernel."""
    # g++ prefers 256-bit vectors on most machines that have 512-bit ones; elementary functions gain a factor
    # of 1.8.
    wide = ("-mprefer-vector-width=512",) if " avx512f " in f"{_cpu_features()} " else ()
    # g++ 12 forgets to align a vector that it spills into the red zone, and the aligned store crashes.
    spills = ("-mno-red-zone",) if platform.machine().lower() in ("x86_64", "amd64") else ()
    return (*_FLAGS, *wide, *spills)


@cache
def openmp_runtime() -> str | None:
    """The file of the OpenMP runtime of torch in this process, or ``None`` for the compiler's own."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.findall(r"\s(/\S*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*)$", mapped, re.MULTILINE)
    # Other packages may have brought runtimes of their own.
    of_torch = [path for path in found if path.startswith(str(Path(torch.__file__).parent))]
    return next(iter([*of_torch, *found]), None)
