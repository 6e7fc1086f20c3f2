"""From C++ source to functions that Python calls.

Kernels are compiled a few at a time: a translation unit costs a process and a link, so there are as many as there are
processors, about equal in length. Compiling goes on in the background until someone asks for the kernels, so that the
stages of the backward run while the forward's kernels are compiled.

Each kernel is a cache entry of its own, under the hash of its text, so that a program that changed in one place is
compiled in one place. Kernels of a unit share its object, which their entries hold by hard links. Processes that want
some of the same kernels at the same time, as the ranks of a job do, divide them among themselves.

A kernel becomes a builtin function of Python (see ``toolchain.cpp_compiler``), which asks tensors for their addresses,
and a function of C for who has the addresses. The OpenMP runtime is the one that torch has loaded already: the object
is linked against that very file, so that there is one pool of threads and ``torch.set_num_threads`` rules over both.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, BuiltKernel, KernelSource, StartedBuild
from gradsplit.compile_core.lowering.cpp_kernels.cpp_machine import (
    compiler_version,
    kernel_flags,
    machine_identity,
    openmp_runtime,
)
from gradsplit.compile_core.toolchain.compile_workers import usable_processors
from gradsplit.compile_core.toolchain.cpp_compiler import builtin_function, compiler, run_compiler
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key
from gradsplit.compile_core.torch_facts.layouts import word_at

logger = logging.getLogger(__name__)

# What a unit costs beside its kernels is about what two small kernels cost.
_FEWEST_IN_UNIT = 2
_SOURCE = "kernels.cpp"
_OBJECT = "kernels.so"
_PLAINER = "-O1"

_METHOD_DEFINITION_BYTES = 32  # the offset at which the address of the function of C lies

Kernels = dict[str, BuiltKernel]

# Text of a kernel -> its function. Kernels of one process that are the same text are the same function.
_loaded: Kernels = {}
# Text of a kernel that is being compiled -> what will be all kernels of its unit, by text.
_compiling: dict[str, Future[Kernels]] = {}
os.register_at_fork(after_in_child=_compiling.clear)  # the threads that would finish them are the parent's


def start_cpp(sources: Sequence[KernelSource], cache_folder: Path) -> StartedBuild:
    """Finds kernels in the cache and starts to compile the others.

    Args:
        sources: C++ kernels with distinct names.
        cache_folder: where results are kept for the next time.

    Returns:
        What waits for the kernels: for each name a function of the kernel's buffers, in order: CPU tensors, or
        addresses as integers. That returns ``None`` and raises ``IndexError`` if a gathered index was out of range.

    Raises:
        CompileError: no working compiler; from here or when the kernels are waited for.
    """
    disk = DiskCache(cache_folder)
    labels = {source.text: source.name for source in reversed(sources)}
    for text in labels:
        if text not in _loaded and text not in _compiling:
            _loaded.update(_find(text, disk))
    missing = [text for text in labels if text not in _loaded and text not in _compiling]
    units = _balanced(missing)
    if units:
        pool = ThreadPoolExecutor(max_workers=len(units), thread_name_prefix="gradsplit-build")
        for unit in units:
            future = pool.submit(_build_or_await, unit, labels, disk)
            _compiling.update(dict.fromkeys(unit, future))
        pool.shutdown(wait=False)
    return StartedBuild(
        [_compiling[text] for text in labels if text in _compiling],
        lambda: {source.name: _wait(source.text) for source in sources},
    )


def _wait(text: str) -> BuiltKernel:
    future = _compiling.get(text)
    if future is not None:
        try:
            _loaded.update(future.result())
        finally:
            _compiling.pop(text, None)  # also when it failed: the next one to want it tries again
    return _loaded[text]


def _find(text: str, disk: DiskCache) -> Kernels:
    """Loads a kernel if the cache has it; one that does not load here is built again."""
    key = _kernel_key(text, disk)
    with disk.find(key) as folder, suppress(OSError, ValueError):
        return {} if folder is None else _load(folder / _OBJECT, [text])
    disk.discard(key)
    return {}


def _balanced(texts: Sequence[str]) -> list[list[str]]:
    """The texts in units that take about equally long, by their length: the longest first, each where there is least.

    The same texts make the same units in whichever order they come, for the sake of processes that want the same ones.
    """
    count = min(usable_processors(), -(-len(texts) // _FEWEST_IN_UNIT))
    units: list[list[str]] = [[] for _ in range(count)]
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        min(units, key=lambda unit: sum(map(len, unit))).append(text)
    return units


def _build_or_await(texts: Sequence[str], labels: Mapping[str, str], disk: DiskCache) -> Kernels:
    """Builds what no other process is building, and loads the others' results: equal ranks build each kernel once."""
    kernels: Kernels = {}
    with ExitStack() as claims:
        claimed = {text: claims.enter_context(disk.claim(_kernel_key(text, disk))) for text in texts}
        for text in texts:  # some may have been built since they were looked for
            if claimed[text]:
                kernels |= _find(text, disk)
        ours = [text for text in texts if claimed[text] and text not in kernels]
        if ours:
            kernels |= _build_unit(ours, labels, disk)
    given_up = [
        text for text in texts if not claimed[text] and not disk.wait_for_claim(_kernel_key(text, disk))
    ]
    for text in texts:
        if not claimed[text]:
            kernels |= _find(text, disk)
    left = [text for text in texts if text not in kernels]
    if left:  # whoever claimed them failed
        build = _build_unit if given_up else _build_or_await
        kernels |= build(left, labels, disk)
    return kernels


def _build_unit(texts: Sequence[str], labels: Mapping[str, str], disk: DiskCache) -> Kernels:
    # The label is for people who look at a profile; it is not part of the kernel's identity.
    parts = [_prelude(), *(f"// {labels[t]}\n{t.replace(KERNEL_SYMBOL, _symbol(t))}" for t in texts)]
    source = "\n\n".join(parts) + "\n"
    key = content_key("cpp unit", _context_key(disk.wanted), *texts)

    def load(folder: Path) -> Kernels:
        built = folder / _OBJECT
        kernels = _load(built, texts)
        for text in texts:
            with disk.entry(_kernel_key(text, disk), lambda entry: _link_file(built, entry / _OBJECT)):
                pass
        return kernels

    try:
        return disk.load(key, lambda folder: _compile(source, folder, disk.folder, key), load)
    except (OSError, ValueError) as error:
        raise CompileError(f"What {shlex.join(compiler())} made cannot be loaded: {error}") from error


def _load(built: Path, texts: Sequence[str]) -> Kernels:
    library = ctypes.CDLL(str(built))
    return {text: _kernel(library, _symbol(text)) for text in texts}


def _kernel(library: ctypes.CDLL, symbol: str) -> BuiltKernel:
    definition = ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    return BuiltKernel(builtin_function(library, symbol), word_at(definition, _METHOD_DEFINITION_BYTES))


def _compile(source: str, folder: Path, cache_folder: Path, key: str) -> None:
    (folder / _SOURCE).write_text(source)
    # Two steps: given -fopenmp, the linker would take the compiler's runtime beside the one of torch.
    runtime = openmp_runtime() or "-fopenmp"
    kept = cache_folder / "failed" / f"{key}.cpp"
    compile_source = ["-c", _SOURCE, "-o", "kernels.o"]
    try:
        run_compiler([*kernel_flags(), *compile_source], folder, kept, source)
    except CompileError as error:
        # An optimizer may have errors that a plainer one has not, and may never end.
        run_compiler([*kernel_flags(), _PLAINER, *compile_source], folder, kept, source)
        logger.warning("Some kernels may be slower: they were compiled with %s, since %s", _PLAINER, error)
    run_compiler(["-shared", "kernels.o", runtime, "-o", _OBJECT], folder, kept, source)
    (folder / "kernels.o").unlink(missing_ok=True)


def _link_file(existing: Path, new: Path) -> None:
    try:
        os.link(existing, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(existing, new)


def _symbol(text: str) -> str:
    return f"gs_{content_key(text)[:16]}"


def _kernel_key(text: str, disk: DiskCache) -> str:
    return content_key("cpp kernel", _context_key(disk.wanted), text)


@cache
def _context_key(cache_folder: Path) -> str:
    """What every object depends on besides the kernels in it."""
    return content_key(
        _prelude(),
        compiler_version(cache_folder),
        machine_identity(),
        " ".join(kernel_flags()),
        sys.version,
    )


@cache
def _prelude() -> str:
    return Path(__file__).with_name("codegen_cpp_prelude.h").read_text()
