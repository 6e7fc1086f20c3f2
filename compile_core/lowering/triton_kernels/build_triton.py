"""From Triton source to functions that launch kernels.

Kernels are compiled ahead of their first call, by processes beside this one, in the background until someone asks for
them. Each is an entry of the disk cache, whatever it is called, and is loaded from there without Triton looking at its
source again.

They are launched by the driver, given their handle, or else through the compiled kernel's own launcher: Triton's
``kernel[grid](...)`` looks at every argument to choose a specialisation, and takes ten times as long. What it would
choose is known here: all arguments are pointers, and torch aligns what it allocates to 16 bytes. A call with an address
that is not so aligned (a slice of the caller's) goes to a second kernel, compiled when it first happens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import (
    KERNEL_SYMBOL,
    BuiltKernel,
    CudaLaunch,
    KernelSource,
    StartedBuild,
)
from gradsplit.compile_core.lowering.triton_kernels import triton_compiler
from gradsplit.compile_core.lowering.triton_kernels.load_binary import load_binary
from gradsplit.compile_core.toolchain.compile_workers import CompileWorkers
from gradsplit.compile_core.toolchain.disk_cache import MANIFEST, DiskCache, content_key
from gradsplit.compile_core.toolchain.fill_together import load_together
from gradsplit.compile_core.toolchain.private_folders import MODE, usable_folder
from gradsplit.compile_core.torch_facts.cuda import current_device, current_raw_stream

_MODULE = "kernel.py"
# Eager rounds a product before it adds; a kernel may say otherwise.
_OPTIONS = {"enable_fp_fusion": False, "sanitize_overflow": False}
_WORKERS = 16
# Kernels whose machine code is made by one start of the assembler. Each entry of the cache has the code of all of them.
_TOGETHER = 8
# Where many processes compile, so that none has the last of them to itself.
_TOGETHER_AMONG_MANY = 4
_FEW_THREADS = 4
# Of a process that compiles while others compute.
_THREADS_BESIDE_OTHERS = 4

# Kind of GPU, architecture and threads of a warp, such as ``("cuda", 90, 32)``.
GpuTarget = tuple[str, int, int]
_Item = TypeVar("_Item")

# Everything of a source but its name and where its arguments begin, which callers add -> launcher. The text alone is no
# kernel: Triton's types are in ``pointers``.
_loaded: dict[KernelSource, BuiltKernel] = {}
_workers = CompileWorkers(Path(triton_compiler.__file__), forks=True, most=_WORKERS)


def start_triton(
    sources: Sequence[KernelSource], cache_folder: Path, most_threads: int | None = None
) -> StartedBuild:
    """Finds kernels in the cache and starts to compile the others.

    Args:
        sources: Triton kernels with distinct names.
        cache_folder: where results are kept.
        most_threads: as many as there are processes that compile by default.

    Returns:
        What waits for the kernels and loads them onto their devices. Called from Python, one is launched on the current
        stream of its device, whichever device is current.

    Raises:
        CompileError: Triton is not installed, or fails; from here or when the kernels are waited for.
    """
    missing = {key: source for source in sources if (key := _without_names(source)) not in _loaded}
    compiling: list[tuple[Sequence[KernelSource], Future[list[Any]]]] = []
    if missing:
        _require_triton()
        threads = min(len(missing), most_threads or _workers.most)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="gradsplit-build")
        compiling = [
            (keys, pool.submit(_compile_launched, [missing[key] for key in keys], cache_folder))
            for keys in _groups(list(missing), threads)
        ]
        pool.shutdown(wait=False)

    def wait() -> Mapping[str, BuiltKernel]:
        for keys, future in compiling:
            for key, compiled in zip(keys, _all_made(future.result()), strict=True):
                if key not in _loaded:
                    _loaded[key] = _launcher(missing[key], compiled, cache_folder)
        return {source.name: _loaded[_without_names(source)] for source in sources}

    return StartedBuild([future for _, future in compiling], wait)


def compile_into_cache(
    sources: Sequence[KernelSource], cache_folder: Path, targets: Mapping[torch.device, GpuTarget]
) -> None:
    """Compiles kernels for whoever will load them; this process need not have their devices.

    Args:
        targets: of the devices, by ``gpu_target``.

    Raises:
        CompileError: Triton is not installed, or fails.
    """
    distinct = {_without_names(source): source for source in sources if 0 not in source.grid}
    wanted = [(source, targets[source.device]) for source in distinct.values()]
    with ThreadPoolExecutor(_THREADS_BESIDE_OTHERS) as pool:
        for made in pool.map(
            lambda group: compile_together(group, cache_folder), _groups(wanted, _THREADS_BESIDE_OTHERS)
        ):
            _all_made(made)


def _groups(items: Sequence[_Item], threads: int) -> list[Sequence[_Item]]:
    """What is compiled together, so that no thread has much more to do than the others."""
    most = _TOGETHER if threads <= _FEW_THREADS else _TOGETHER_AMONG_MANY
    size = max(1, min(most, len(items) // threads))
    return [items[start : start + size] for start in range(0, len(items), size)]


def _all_made(kernels: list[Any]) -> list[Any]:
    """The results of ``compile_together``, if they are kernels."""
    for kernel in kernels:
        if isinstance(kernel, Exception):
            raise kernel
    return kernels


def start_workers() -> None:
    """Starts the processes that compile, while there is nothing to compile yet: they import Triton first."""
    if triton_compiler.triton is not None:
        with suppress(CompileError):  # raised again where one is needed
            _workers.start(_workers.most)


def compile_triton_for(
    source: KernelSource, target: GpuTarget, cache_folder: Path, is_aligned: bool = True
) -> Any:
    """Compiles a kernel for a GPU that need not be there, or finds it in the cache.

    Args:
        source: a Triton kernel.
        target: the GPU.
        cache_folder: where the result is kept.
        is_aligned: whether all addresses are multiples of 16.

    Returns:
        Triton's ``CompiledKernel``.

    Raises:
        CompileError: Triton is not installed, or fails.
    """
    return _all_made(compile_together([(source, target)], cache_folder, is_aligned))[0]


def compile_together(
    wanted: Sequence[tuple[KernelSource, GpuTarget]], cache_folder: Path, is_aligned: bool = True
) -> list[Any]:
    """``compile_triton_for`` for several kernels, by one process; what failed is an exception in the kernel's place."""
    _require_triton()
    disk = DiskCache(cache_folder)
    keys = [_key(source, target, is_aligned) for source, target in wanted]
    kernels = dict(zip(keys, wanted, strict=True))

    def fill(folders: Mapping[str, Path]) -> dict[str, Exception]:
        requests = []
        for key, folder in folders.items():
            source, target = kernels[key]
            (folder / _MODULE).write_text(_function(source))
            requests.append(
                {
                    "module": str(folder / _MODULE),
                    "function": _function_name(source),
                    "pointers": source.pointers,
                    "is_aligned": is_aligned,
                    "target": target,
                    "options": _options(source),
                    "folder": str(folder),
                }
            )
        answers = zip(folders, _workers.ask({"kernels": requests})["answers"], strict=True)
        return {key: failure(key, answer) for key, answer in answers if answer["error"] is not None}

    def failure(key: str, answer: Mapping[str, str]) -> CompileError:
        source, _ = kernels[key]
        kept = disk.folder / "failed" / f"{key}.py"
        with suppress(OSError):
            kept.parent.mkdir(MODE, parents=True, exist_ok=True)
            write_module(source, kept)
        error = CompileError(
            f"Triton failed on the kernel {source.name}: {answer['error']}\nThe source is in {kept}."
        )
        error.add_note(answer["traceback"])
        return error

    def load(key: str, folder: Path) -> Any:
        return triton_compiler.load_kernel(folder, kernels[key][0].pointers, MANIFEST)

    results = load_together(disk, keys, fill, load)
    return [results[key] for key in keys]


def _key(source: KernelSource, target: GpuTarget, is_aligned: bool) -> str:
    description = repr((source.pointers, sorted(_options(source).items()), target, is_aligned))
    version = triton_compiler.triton.__version__
    return content_key("triton kernel", version, _prelude(), source.text, description)


def _options(source: KernelSource) -> dict[str, Any]:
    return {**_OPTIONS, **dict(source.meta)}


def write_module(source: KernelSource, path: Path) -> str:
    """Writes a module that Triton can read the kernel from, and returns the function's name, which profilers show."""
    path.write_text(f"{_prelude()}\n\n{_function(source)}")
    return _function_name(source)


def _function_name(source: KernelSource) -> str:
    return "gs_" + "".join(letter if letter.isalnum() else "_" for letter in source.name)


def _function(source: KernelSource) -> str:
    return f"{source.text.replace(KERNEL_SYMBOL, _function_name(source))}\n"


def _require_triton() -> None:
    if triton_compiler.triton is None:
        raise CompileError(
            "Compiling for a GPU needs Triton, which is not installed. Install the triton package, or choose "
            'backend="aot_eager".'
        )


def _without_names(source: KernelSource) -> KernelSource:
    return replace(source, name="", buffers=(), bases=())


def triton_version() -> str:
    """Empty where Triton is not installed."""
    return "" if triton_compiler.triton is None else str(triton_compiler.triton.__version__)


@cache
def _prelude() -> str:
    return triton_compiler.PRELUDE.read_text()


def _compile_launched(sources: Sequence[KernelSource], cache_folder: Path) -> list[Any]:
    """The kernels for the devices that they will run on; ``None`` for one over no elements."""
    launched = [source for source in sources if 0 not in source.grid]
    wanted = [(source, gpu_target(_device_of(source))) for source in launched]
    made = iter(compile_together(wanted, cache_folder))
    return [None if 0 in source.grid else next(made) for source in sources]


def _device_of(source: KernelSource) -> torch.device:
    return source.device if source.device.index is not None else torch.device("cuda", 0)


def gpu_target(device: torch.device) -> GpuTarget:
    """What kernels for a device of this process are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", 10 * major + minor, 32


def _launcher(source: KernelSource, aligned: Any, cache_folder: Path) -> BuiltKernel:
    """What launches the kernel."""
    if aligned is None:
        return BuiltKernel(_nothing, 0)
    keep_tritons_cache_private()
    device = _device_of(source)
    stream_of, device_of_thread = current_raw_stream, current_device
    index = device.index
    grid_x, grid_y, grid_z = source.grid
    kernels: dict[bool, Any] = {True: aligned}
    with torch.cuda.device(device):
        handle = _handle_of(aligned, index)

    def launch(*buffers: Any) -> None:
        combined = 0
        for buffer in buffers:
            if type(buffer) is not int:
                return launch(*(b if type(b) is int else b.data_ptr() for b in buffers))
            combined |= buffer
        if combined & 15 or device_of_thread() != index:
            return launch_with_care(combined & 15 == 0, buffers)
        # Where the driver has launched the kernel so far, this makes its launcher.
        run = aligned.run
        stream, packed = stream_of(index), aligned.packed_metadata
        run(grid_x, grid_y, grid_z, stream, aligned.function, packed, None, None, None, *buffers)
        return None

    def launch_with_care(is_aligned: bool, addresses: Sequence[int]) -> None:
        if is_aligned not in kernels:
            kernels[is_aligned] = compile_triton_for(source, gpu_target(device), cache_folder, is_aligned)
        with torch.cuda.device(device):
            kernel = kernels[is_aligned]
            kernel._init_handles()
            stream = stream_of(index)
            kernel.run(
                *source.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *addresses
            )

    threads, shared_bytes = 32 * aligned.metadata.num_warps, aligned.metadata.shared
    return BuiltKernel(launch, handle, CudaLaunch(device, (grid_x, grid_y, grid_z), threads, shared_bytes))


@cache
def keep_tritons_cache_private() -> None:
    """Triton keeps its launchers in a cache of its own, and loads them whoever wrote them."""
    wanted = Path(triton_compiler.triton.knobs.cache.dir)
    folder = usable_folder(wanted)
    if not wanted.exists() or not folder.samefile(wanted):
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def _handle_of(kernel: Any, device_index: int) -> int:
    """Loads a kernel; the driver's handle of it, or 0 where it needs more than its addresses to be launched.

    Only what is to be refused, or needs more, is loaded by Triton, which makes a launcher, too.
    """
    if _is_plain(kernel.metadata):
        shared_bytes = kernel.metadata.shared
        handle, most_threads = load_binary(kernel.name, kernel.kernel, device_index, shared_bytes)
        if 32 * kernel.metadata.num_warps <= most_threads:
            return handle
    kernel._init_handles()
    return kernel.function if _is_plain(kernel.metadata) else 0


def _is_plain(metadata: Any) -> bool:
    """Whether nothing but the addresses is needed to launch a kernel."""
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    is_cuda = metadata.target.backend == "cuda"
    return is_cuda and metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in needs)


def _nothing(*buffers: Any) -> None:
    """Launches a kernel over no elements."""
