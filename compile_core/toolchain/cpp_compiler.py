"""The C++ compiler of the user's machine, and builtin functions out of what it made.

A shared object that is built here needs none of Python's headers: a function's symbol is a ``PyMethodDef``, from which
``PyCFunction_NewEx`` makes a builtin function. Calling one costs about as much as calling ``len``, several times less
than through ``ctypes``.
"""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.options import chosen_cpp_compiler
from gradsplit.compile_core.toolchain.private_folders import MODE

_ERROR_LINES = 12
# For each so many characters of a source that are begun. Ours take two to four seconds; g++ 13.3 never ends with some
# that other compilers are done with in a tenth of one.
_MOST_PROCESSOR_SECONDS, _CHARACTERS = 30, 100_000
_LIMITED = 'ulimit -S -t "$0" 2>/dev/null; exec "$@"'  # which no limit of the user's own that is lower stops


@cache
def compiler() -> tuple[str, ...]:
    """The command that compiles C++, in words.

    Raises:
        CompileError: there is none.
    """
    chosen = chosen_cpp_compiler()
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompileError(
                f"CXX is {shlex.join(chosen)!r}, and there is no program {chosen[0]!r} on PATH."
            )
        return tuple(chosen)
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return (path,)
    raise CompileError(
        "Compiling for CPU needs a C++ compiler, and none of g++, c++, clang++ is on PATH. Install g++, or "
        'choose backend="aot_eager".'
    )


def run_compiler(arguments: Sequence[str], folder: Path, kept_source: Path, source: str) -> None:
    """One step of a build in ``folder``.

    Raises:
        CompileError: the step failed, or took more of a processor's time than any should; ``source`` is then kept at
            ``kept_source`` for whoever looks into it.
    """
    step = [*compiler(), *arguments]
    most_s = _MOST_PROCESSOR_SECONDS * (1 + len(source) // _CHARACTERS)
    limited = ["/bin/sh", "-c", _LIMITED, str(most_s), *step]
    result = subprocess.run(limited, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        with suppress(OSError):
            kept_source.parent.mkdir(MODE, parents=True, exist_ok=True)
            kept_source.write_text(source)
        first = "\n".join(f"  {line}" for line in result.stderr.splitlines()[:_ERROR_LINES])
        raise CompileError(
            f"{' '.join(step)} failed with status {result.returncode}:\n{first}\n"
            f"The source is kept in {kept_source}."
        )


def builtin_function(library: ctypes.CDLL, symbol: str, bound: Any = None) -> Callable[..., Any]:
    """The builtin function of a method definition, whose C code gets ``bound`` as its first argument.

    It stays valid because a loaded library is never unloaded.
    """
    definition = ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(("PyCFunction_NewEx", ctypes.pythonapi))(definition, bound, None)
