"""Triton itself: the one file that imports it. Run as a script it is a process that compiles what it is sent.

Such a process needs neither torch nor the rest of this package, so it starts in a fraction of a second. It reads a
request a line from its input and answers each with a line, both JSON; ``toolchain.compile_workers`` is the other end.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gradsplit.compile_core.lowering.triton_kernels.assembled_together import AssembledTogether
from gradsplit.compile_core.lowering.triton_kernels.passes_left_out import leave_out
from gradsplit.compile_core.lowering.triton_kernels.quick_front_end import KERNEL_MODULE, quicken


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
# Each leaves some 5 MB. In what a collection frees, later kernels take a sixth longer to compile than in fresh memory.
_REQUESTS_A_COLLECTION = 64
# What kernels call.
PRELUDE = Path(__file__).with_name("codegen_triton_prelude.py.in")
# What is kept of what Triton makes; the other stages of its compilation are of no use later.
_KEPT = (".json", ".cubin", ".hsaco", ".ptx")


def gpu_target(kind: str, architecture: int, warp_size: int) -> Any:
    """A ``GPUTarget``."""
    return triton.backends.compiler.GPUTarget(kind, architecture, warp_size)


def import_function(path: Path, name: str, given: Mapping[str, Any] | None = None) -> Any:
    """A ``triton.jit`` function of a module that lies in a file; Triton reads its source from there.

    Args:
        given: what the module uses and does not define.
    """
    module = ModuleType(f"{KERNEL_MODULE}{path.parent.name}")
    vars(module).update(given or {})
    # Not by a loader, which leaves a folder beside it: what is built is kept on disk only if it is nothing but files.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return getattr(module, name)


@cache
def _prelude(is_nvidia: bool, is_aligned: bool) -> Mapping[str, Any]:
    """The names of the prelude. Triton reads the source of each of its functions, so one module is for all kernels."""
    module = ModuleType("gradsplit_triton_prelude")
    exec(compile(PRELUDE.read_bytes(), PRELUDE, "exec"), vars(module))
    vars(module)["NVIDIA"] = triton.language.constexpr(is_nvidia)
    vars(module)["ALIGNED"] = triton.language.constexpr(is_aligned)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def compile_into(
    request: Mapping[str, Any], folder: Path, change_stages: Callable[..., object] | None
) -> None:
    """Compiles a kernel for a GPU that need not be there, and puts the result into a folder.

    Args:
        request: ``module`` (a path, without the prelude), ``function``, ``pointers`` (types of the arguments),
            ``is_aligned`` (whether all addresses are multiples of 16), ``target`` (arguments of ``gpu_target``),
            ``options`` of Triton's.
        folder: where the files go that ``load_kernel`` reads.
        change_stages: what Triton calls with the stages before it runs them.
    """
    prelude = _prelude(request["target"][0] == "cuda", request["is_aligned"])
    function = import_function(Path(request["module"]), request["function"], prelude)
    names, pointers = function.arg_names, request["pointers"]
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(names))}
    attributes = aligned if request["is_aligned"] else {}
    unit = triton.compiler.ASTSource(function, dict(zip(names, pointers, strict=True)), {}, attributes)
    triton.knobs.cache.manager_class = partial(_Results, folder)
    triton.knobs.runtime.add_stages_inspection_hook = change_stages
    triton.compile(unit, target=gpu_target(*request["target"]), options=request["options"])


def compile_all(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``compile_into`` for several kernels, each into its request's ``folder``.

    Returns:
        For each the ``error``, or ``None``, and its ``traceback``.
    """
    together = AssembledTogether()
    errors: dict[Path, Exception] = {}
    folders = [Path(request["folder"]) for request in requests]
    for request, folder in zip(requests, folders, strict=True):
        try:
            compile_into(request, folder, partial(_shorten, together, folder))
        except Exception as error:
            errors[folder] = error
    errors.update(together.finish())
    return [_answer(errors.get(folder)) for folder in folders]


def _shorten(together: AssembledTogether, folder: Path, *compilation: Any) -> tuple[str, str]:
    """Changes the stages of a kernel, so that less is done for the same machine code.

    Returns:
        What tells the kernel from others in Triton's cache, which is not used. Triton 3.8 asks for that alone first.
    """
    if compilation:
        _, stages, options, *_ = compilation
        leave_out(stages, triton._C.libtriton)
        together.wait_for(stages, options, folder)
    return "", ""


def _answer(error: Exception | None) -> dict[str, Any]:
    if error is None:
        return {"error": None}
    return {"error": f"{error}", "traceback": "".join(traceback.format_exception(error))}


class _Results:
    """Takes the place of Triton's cache: what is kept goes where it belongs, and the rest nowhere."""

    def __init__(self, folder: Path, key: str, override: bool = False, dump: bool = False) -> None:
        self._folder = folder

    def get_file(self, filename: str) -> None:
        return None

    def get_group(self, filename: str) -> None:
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if not filename.endswith(_KEPT):
            return os.devnull  # not even written down, which takes long
        path = self._folder / filename
        path.write_bytes(data if isinstance(data, bytes) else str(data).encode())
        return str(path)

    def put_group(self, filename: str, group: Mapping[str, str]) -> None:
        pass


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


def _prepare() -> None:
    # What it would call an entry of its cache: hashing its libraries takes the time of several kernels.
    triton.compiler.compiler.get_cache_key = lambda *_, **__: ""
    # Lines of a file that is gone by then; texts with their tables cannot be joined.
    triton.knobs.compilation.disable_line_info = True
    quicken(triton)


_ANY_KERNEL = """
@triton.jit
def any_kernel(p0, p1):
    x = tl.arange(0, 128)
    value = tl.load(p0 + x, mask=x < 100, other=0.0).to(tl.float32)
    tl.store(p1 + x, rounded_to_bfloat16(value * tl.sum(value, 0)).to(tl.bfloat16))
"""


def _warm_up() -> None:
    """Compiles a kernel up to its machine code, and forgets it: what a process does with its first kernel only, those
    that are forked need not do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(_ANY_KERNEL)
        request = {
            "module": path,
            "function": "any_kernel",
            "pointers": ["*bf16", "*bf16"],
            "is_aligned": True,
        }
        request |= {"target": ("cuda", 80, 32), "options": {}}
        compile_into(request, Path(folder), partial(_shorten, AssembledTogether(), Path(folder)))


def _serve() -> None:
    # Triton prints to the output what it has to say about errors; the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Of what a compilation makes nearly nothing lives on, so looking through it now and then is enough.
    gc.freeze()
    gc.disable()
    for number in itertools.count(1):
        if not select.select([0], [], [], _IDLE_S)[0]:
            return
        line = sys.stdin.readline()
        if not line:
            return
        answers.write(json.dumps({"answers": compile_all(json.loads(line)["kernels"])}) + "\n")
        answers.flush()
        if number % _REQUESTS_A_COLLECTION == 0:
            gc.collect()


def _fork(pairs: Sequence[str]) -> None:
    """Becomes a process for each pair of descriptors, "requests,answers", which has them as its input and output, and
    returns there; the process itself waits until these have ended, and ends them when it is told to end."""
    wanted = [tuple(map(int, pair.split(","))) for pair in pairs]
    forked = []
    for requests, answers in wanted:
        forked.append(os.fork())
        if forked[-1] == 0:
            os.dup2(requests, 0)
            os.dup2(answers, 1)
            break
    for descriptor in itertools.chain(*wanted):
        os.close(descriptor)
    if forked[-1] == 0:
        return

    def end(*_: Any) -> None:
        for process in forked:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    for process in forked:
        os.waitpid(process, 0)
    os._exit(0)


if __name__ == "__main__":
    _prepare()
    if len(sys.argv) > 1:
        with suppress(Exception):  # a kernel that is asked for says what is wrong
            _warm_up()
        _fork(sys.argv[1:])
    _serve()
