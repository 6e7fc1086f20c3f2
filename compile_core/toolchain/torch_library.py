"""C functions of torch, and small C++ files that are built against them.

Such a file includes no header but ours, since a user's machine may lack the others and torch's take long to compile: it
builds in a fifth of a second, once for a machine. What it needs of torch are C symbols that torch exports for
ahead-of-time compiled programs, and a few functions with well-known mangled names; the loader fills in their addresses.
What has no symbol is searched for (``torch_facts.layouts``). Where anything is missing or differs (no compiler, another
C++ library, another CPython), loading raises, and Python does what C would have done.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.options import default_cache_folder
from gradsplit.compile_core.toolchain.cpp_compiler import run_compiler
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key
from gradsplit.compile_core.torch_facts.bindings import LIBRARY_FILE
from gradsplit.compile_core.torch_facts.layouts import tensor_offset, word_at

# What loading raises where it does not work here.
LoadErrors = (CompileError, OSError, AttributeError, ValueError, LookupError)

_HEADER = Path(__file__).with_name("python_objects.h")
_FLAGS = ("-std=gnu++17", "-O2", "-fPIC", "-shared", "-w")
_TUPLE_ITEMS_OFFSET = 24


def load_library(source: Path, symbols: Mapping[str, str], opcodes: str) -> ctypes.CDLL:
    """Builds a C++ file, or finds it in the cache, and gives it addresses of torch's functions and tensors' layout.

    Args:
        source: the file.
        symbols: its variable -> the symbol whose address goes there.
        opcodes: see ``build_library``.

    Raises:
        LoadErrors: it does not work here.
    """
    check_python()
    library = build_library(source, opcodes)
    for name, symbol in symbols.items():
        address = address_of(symbol)
        if address is None:
            raise LookupError(f"torch has no {symbol}")
        ctypes.c_void_p.in_dll(library, name).value = address
    ctypes.c_int64.in_dll(library, "gs_implementation_offset").value = tensor_offset()
    return library


def build_library(source: Path, opcodes: str) -> ctypes.CDLL:
    """Builds a C++ file, or finds it in the cache.

    Args:
        source: the file.
        opcodes: what it includes as ``opcodes.h``: the tables of Python that it goes by.

    Raises:
        LoadErrors: it does not work here.
    """
    text, header = source.read_text(), _HEADER.read_text()
    disk = DiskCache(default_cache_folder())
    key = content_key(
        source.stem, text, header, opcodes, " ".join(_FLAGS), platform.machine(), sys.platform, sys.version
    )
    built = f"{source.stem}.so"

    def build(folder: Path) -> None:
        (folder / source.name).write_text(text)
        (folder / _HEADER.name).write_text(header)
        (folder / "opcodes.h").write_text(opcodes)
        kept = disk.folder / "failed" / f"{key}.cpp"
        run_compiler([*_FLAGS, source.name, "-o", built], folder, kept, text)

    return disk.load(key, build, lambda folder: ctypes.CDLL(str(folder / built)))


def cpp_enum(numbers: type[IntEnum]) -> str:
    """The same enumeration in C++."""
    members = ", ".join(f"{member.name} = {member.value}" for member in numbers)
    return f"enum {numbers.__name__} : long {{ {members} }};\n"


def check_python() -> None:
    """The layout of objects that is read without a function of CPython's.

    Raises:
        ValueError: it is another one.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED") or sys.implementation.name != "cpython":
        raise ValueError("objects are laid out differently in this Python")
    probe = (object(), object())
    words = [word_at(id(probe), place) for place in (8, 16, _TUPLE_ITEMS_OFFSET)]
    if words != [id(tuple), len(probe), id(probe[0])]:
        raise ValueError("objects are laid out differently in this Python")


@cache
def dtype_code(dtype: torch.dtype) -> int:
    """torch's number of a dtype."""
    return _ask("aoti_torch_get_dtype", torch.empty(0, dtype=dtype, device="meta"))


@cache
def strided_code() -> int:
    """torch's number of the strided layout."""
    return _ask("aoti_torch_get_layout", torch.empty(0, device="meta"))


@cache
def device_codes(device: torch.device) -> tuple[int, int]:
    """torch's number of a device's type, and the device's index (-1 where the type has but one)."""
    tensor = torch.empty(0, device=device)
    index = -1 if device.type in ("cpu", "meta") else _ask("aoti_torch_get_device_index", tensor)
    return _ask("aoti_torch_get_device_type", tensor), index


def _ask(function: str, tensor: torch.Tensor) -> int:
    handle, answer = ctypes.c_void_p(tensor._cdata), ctypes.c_int32()
    if getattr(_torch_symbols(), function)(ctypes.byref(handle), ctypes.byref(answer)):
        raise LookupError(f"{function} fails")
    return answer.value


@cache
def address_of(symbol: str) -> int | None:
    """The address of one of torch's functions, or None if there is none of this name."""
    try:
        return ctypes.cast(getattr(_torch_symbols(), symbol), ctypes.c_void_p).value
    except AttributeError:
        return None


def dtype_number(dtype: torch.dtype) -> int:
    """A dtype as torch's functions of C take it."""
    return getattr(_torch_symbols(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()


@cache
def _torch_symbols() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY_FILE)  # a look-up in it goes on to the libraries that it depends on
