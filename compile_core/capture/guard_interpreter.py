"""Builds and loads the interpreter of guard programs, and checks what it takes for granted.

A call whose guards hold should cost next to nothing, and most of what a check does is look-ups in dictionaries, which C
does ten times faster than bytecode. ``guard_interpreter.cpp`` is one small file without headers: it compiles in a
fifth of a second, once for a machine. It asks torch for a tensor's metadata through the C symbols that torch exports
for ahead-of-time compiled programs. Three things have no such symbol: whether a tensor requires grad (a member function
with a well-known mangled name), where in a Python object torch keeps its tensor, and where a tensor keeps its dispatch
keys. The places of the last two are searched for, and everything is tried on a few tensors. Where anything is missing
or differs (no compiler, another C++ library, another CPython), guards are checked by generated Python, with the same
answers.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compile_core.errors import CompileError
from compile_core.options import default_cache_folder
from compile_core.toolchain.cpp_compiler import builtin_function, run_compiler
from compile_core.toolchain.disk_cache import DiskCache, content_key

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=gnu++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-w")
_TORCH_SYMBOLS = {
    "gs_get_dtype": "aoti_torch_get_dtype",
    "gs_get_layout": "aoti_torch_get_layout",
    "gs_get_device_type": "aoti_torch_get_device_type",
    "gs_get_device_index": "aoti_torch_get_device_index",
    "gs_get_dim": "aoti_torch_get_dim",
    "gs_get_sizes": "aoti_torch_get_sizes",
    "gs_get_strides": "aoti_torch_get_strides",
    "gs_get_numel": "aoti_torch_get_numel",
    "gs_get_storage_offset": "aoti_torch_get_storage_offset",
    "gs_get_data_ptr": "aoti_torch_get_data_ptr",
    "gs_dtype_size": "aoti_torch_dtype_element_size",
    "gs_requires_grad": "_ZNK3c1010TensorImpl13requires_gradEv",
}
_TUPLE_ITEMS_OFFSET = 24


class GuardInterpreter:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL, lazy_keys: dict[tuple[bool, bool], int]) -> None:
        self._library = library
        self._describe = builtin_function(library, "gs_describe")
        self._lazy_keys = lazy_keys
        self._dtype_codes: dict[torch.dtype, int] = {}
        self._device_codes: dict[torch.device, tuple[int, int]] = {}

    def bind(self, program: bytes, constants: tuple[Any, ...]) -> Callable[..., Any]:
        """The check that runs a program: it returns the list of inputs, the number of the guard that fails, or -1."""
        return builtin_function(self._library, "gs_check", (program, constants))

    def lazy_keys(self, is_conj: bool, is_neg: bool) -> int:
        """The dispatch keys of a tensor that is lazily conjugated, or negated, or neither."""
        return self._lazy_keys[is_conj, is_neg]

    def dtype_code(self, dtype: torch.dtype) -> int:
        """torch's number of a dtype."""
        if dtype not in self._dtype_codes:
            self._dtype_codes[dtype] = self._describe(torch.empty(0, dtype=dtype, device="meta"))[0]
        return self._dtype_codes[dtype]

    @property
    def strided_code(self) -> int:
        """torch's number of the strided layout."""
        return self._describe(torch.empty(0, device="meta"))[1]

    def device_codes(self, device: torch.device) -> tuple[int, int]:
        """torch's number of a device's type, and the device's index (-1 where the type has but one)."""
        if device not in self._device_codes:
            kind, index = self._describe(torch.empty(0, device=device))[2:]
            self._device_codes[device] = (kind, -1 if device.type in ("cpu", "meta") else index)
        return self._device_codes[device]


@cache
def guard_interpreter() -> GuardInterpreter | None:
    """The interpreter, built if need be; None where it cannot be had."""
    try:
        return _load()
    except (CompileError, OSError, AttributeError, ValueError, LookupError) as error:
        logger.info("guards are checked by generated Python: %s", error)
        return None


def _load() -> GuardInterpreter:
    _check_python()
    source = _SOURCE.read_text()
    disk = DiskCache(default_cache_folder())
    key = content_key("guards", source, " ".join(_FLAGS), platform.machine(), sys.platform, sys.version)

    def build(folder: Path) -> None:
        (folder / _SOURCE.name).write_text(source)
        kept = disk.folder / "failed" / f"{key}.cpp"
        run_compiler([*_FLAGS, _SOURCE.name, "-o", "guards.so"], folder, kept, source)

    with disk.entry(key, build) as folder:
        library = ctypes.CDLL(str(folder / "guards.so"))
    symbols = ctypes.CDLL(torch._C.__file__)  # a look-up in it goes on to the libraries that it depends on
    for name, symbol in _TORCH_SYMBOLS.items():
        address = ctypes.cast(getattr(symbols, symbol), ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(library, name).value = address
    return GuardInterpreter(library, _place_fields(library))


def _check_python() -> None:
    """The layout of objects that the interpreter reads without a function of CPython's."""
    if sysconfig.get_config_var("Py_GIL_DISABLED") or sys.implementation.name != "cpython":
        raise ValueError("objects are laid out differently in this Python")
    probe = (object(), object())
    words = [_word(id(probe), place) for place in (8, 16, _TUPLE_ITEMS_OFFSET)]
    if words != [id(tuple), len(probe), id(probe[0])]:
        raise ValueError("objects are laid out differently in this Python")


def _place_fields(library: ctypes.CDLL) -> dict[tuple[bool, bool], int]:
    """Tells the library where a Python object keeps its tensor, and a tensor its dispatch keys; returns the keys of the
    lazy views."""
    with torch.inference_mode(False):
        plain = torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
        conjugated, negated = plain.conj(), plain.conj().imag
        tensors = (plain, conjugated, negated, torch.empty(2, device="meta"), torch.nn.Parameter(plain))
    keys = [torch._C._dispatch_keys(tensor).raw_repr() for tensor in tensors]
    place = _find_place(range(16, 48, 8), [id(tensor) for tensor in tensors], [t._cdata for t in tensors])
    keys_place = _find_place(range(16, 184, 8), [tensor._cdata for tensor in tensors], keys)
    conj, neg = keys[1] & ~keys[0], keys[2] & ~keys[0]
    ctypes.c_int64.in_dll(library, "gs_implementation_offset").value = place
    ctypes.c_int64.in_dll(library, "gs_keys_offset").value = keys_place
    ctypes.c_uint64.in_dll(library, "gs_lazy_keys").value = conj | neg
    return {(False, False): 0, (True, False): conj, (False, True): neg, (True, True): conj | neg}


def _find_place(places: range, addresses: list[int], values: list[int]) -> int:
    """The first place at which every address holds its value."""
    for place in places:
        if all(_word(address, place) == value for address, value in zip(addresses, values, strict=True)):
            return place
    raise LookupError("torch lays out its tensors in an unknown way")


def _word(address: int, place: int) -> int:
    return ctypes.c_uint64.from_address(address + place).value
