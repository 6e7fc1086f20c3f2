"""Kernels into the driver, which gives a handle for each.

Triton does it in a module of C, which it compiles once for a machine: that takes as long as several kernels.
"""

from __future__ import annotations

import ctypes
from functools import cache

from gradsplit.compile_core.errors import CompileError

_DRIVER = "libcuda.so.1"
# CUfunction_attribute: CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK.
_MOST_THREADS = 0


def load_binary(name: str, binary: bytes, device_index: int) -> tuple[int, int]:
    """Loads a compiled kernel onto a GPU, which is the current one; it stays there.

    Returns:
        The driver's handle, and how many threads a block of the kernel may have.

    Raises:
        CompileError: the driver refuses it.
    """
    context, module, function = (ctypes.c_void_p() for _ in range(3))
    most_threads = ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:  # this thread has not used a GPU yet
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device_index))
        _call("cuCtxSetCurrent", context)
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary))
    _call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
    _call("cuFuncGetAttribute", ctypes.byref(most_threads), ctypes.c_int(_MOST_THREADS), function)
    assert function.value is not None
    return function.value, most_threads.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_DRIVER)


def _call(function: str, *arguments: object) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise CompileError(f"the driver's {function} gives error {status}")
