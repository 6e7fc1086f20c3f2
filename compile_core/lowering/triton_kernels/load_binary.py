"""Kernels into the driver, which gives a handle for each.

Triton does it in a module of C, which it compiles once for a machine, and with it goes a launcher in C for each number
of arguments: each takes as long as several kernels.
"""

from __future__ import annotations

import ctypes
from functools import cache

from gradsplit.compile_core.errors import CompileError

_DRIVER = "libcuda.so.1"
# CUfunction_attribute: of CU_FUNC_ATTRIBUTE_ MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES, MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_THREADS, _STATIC_BYTES, _MOST_SHARED_BYTES = 0, 1, 8
# CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, and CU_FUNC_CACHE_PREFER_SHARED.
_SHARED_BYTES_IF_ASKED, _PREFER_SHARED = 97, 1
# What a block may have of shared memory on any GPU without asking.
_SHARED_BYTES_ANYWHERE = 48 << 10


def load_binary(name: str, binary: bytes, device_index: int, shared_bytes: int) -> tuple[int, int]:
    """Loads a compiled kernel onto a GPU, which is the current one; it stays there.

    Args:
        shared_bytes: what a block is given of shared memory when the kernel is launched.

    Returns:
        The driver's handle, and how many threads a block of the kernel may have; none where a block cannot have so much
        memory.

    Raises:
        CompileError: the driver refuses it.
    """
    context, module, function = (ctypes.c_void_p() for _ in range(3))
    most_threads, if_asked, static_bytes = (ctypes.c_int() for _ in range(3))
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:  # this thread has not used a GPU yet
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device_index))
        _call("cuCtxSetCurrent", context)
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary))
    _call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
    _call("cuFuncGetAttribute", ctypes.byref(most_threads), ctypes.c_int(_MOST_THREADS), function)
    if shared_bytes > _SHARED_BYTES_ANYWHERE:
        _call(
            "cuDeviceGetAttribute",
            ctypes.byref(if_asked),
            ctypes.c_int(_SHARED_BYTES_IF_ASKED),
            ctypes.c_int(device_index),
        )
        _call("cuFuncGetAttribute", ctypes.byref(static_bytes), ctypes.c_int(_STATIC_BYTES), function)
        most_bytes = if_asked.value - static_bytes.value
        if shared_bytes > most_bytes:
            most_threads.value = 0
        else:
            _call("cuFuncSetCacheConfig", function, ctypes.c_int(_PREFER_SHARED))
            _call("cuFuncSetAttribute", function, ctypes.c_int(_MOST_SHARED_BYTES), ctypes.c_int(most_bytes))
    assert function.value is not None
    return function.value, most_threads.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_DRIVER)


def _call(function: str, *arguments: object) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise CompileError(f"the driver's {function} gives error {status}")
