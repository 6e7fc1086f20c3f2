"""Loads the interpreter of guard programs, and checks what it takes for granted.

A call whose guards hold should cost next to nothing, and most of what a check does is look-ups in dictionaries, which C
does ten times faster than bytecode. It asks torch for a tensor's metadata through C symbols (see
``toolchain.torch_library``). Where anything is missing or differs, guards are checked by generated Python, with the
same answers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from gradsplit.compile_core.toolchain.cpp_compiler import builtin_function
from gradsplit.compile_core.toolchain.torch_library import LoadErrors, cpp_enum, load_library
from gradsplit.compile_core.torch_facts.layouts import dispatch_keys_offset

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
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


class GuardOpcode(IntEnum):
    """The first word of an instruction; see ``guard_program``. C++ gets these numbers when it is built."""

    ATTRIBUTE = 0
    INSTANCE_DICT = 1
    ITEM = 2
    CALL = 3
    EXPRESSION = 4
    TYPE = 5
    IDENTITY = 6
    DISTINCT = 7
    EQUAL = 8
    LENGTH = 9
    KEYS = 10
    PRESENT = 11
    ABSENT = 12
    ALL_FALSE = 13
    TENSOR = 14
    APART = 15
    RETURN = 16


class GuardInterpreter:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL, lazy_keys: dict[tuple[bool, bool], int]) -> None:
        self._library = library
        self._lazy_keys = lazy_keys

    def bind(self, program: bytes, constants: tuple[Any, ...]) -> Callable[..., Any]:
        """The check that runs a program: it returns the list of inputs, the number of the guard that fails, or -1."""
        return builtin_function(self._library, "gs_check", (program, constants))

    def lazy_keys(self, is_conj: bool, is_neg: bool) -> int:
        """The dispatch keys of a tensor that is lazily conjugated, or negated, or neither; it has memory."""
        return self._lazy_keys[is_conj, is_neg]


@cache
def guard_interpreter() -> GuardInterpreter | None:
    """The interpreter, built if need be; None where it cannot be had."""
    try:
        return _load()
    except LoadErrors as error:
        logger.info("guards are checked by generated Python: %s", error)
        return None


def _load() -> GuardInterpreter:
    library = load_library(_SOURCE, _TORCH_SYMBOLS, cpp_enum(GuardOpcode))
    offset, conj, neg, zero = dispatch_keys_offset()
    ctypes.c_int64.in_dll(library, "gs_keys_offset").value = offset
    ctypes.c_uint64.in_dll(library, "gs_lazy_keys").value = conj | neg | zero
    keys = {(False, False): 0, (True, False): conj, (False, True): neg, (True, True): conj | neg}
    return GuardInterpreter(library, keys)
