"""Operations that the CUDA driver queues on a stream: noted one by one, and then queued in a single call.

Averaging a bucket takes a dozen of them. One by one, through torch, they took a slow host 0.2 to 0.4 ms, which a step
notices that leaves the host no more time than that. What is noted, in 64-bit words:

    COPY    target, source, bytes
    WRITE   address, a value of 32 bits
    WAIT    address, a value of 32 bits, which what is there reaches, in the order of a clock
    LAUNCH  kernel's handle, the grid's first two sizes, threads, shared bytes, count of arguments, their addresses

``driver_queue.cpp`` queues them.
"""

from __future__ import annotations

import ctypes
from array import array
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from gradsplit.compile_core.ir.kernels import BuiltKernel
from gradsplit.compile_core.toolchain.torch_library import build_library, cpp_enum

_SOURCE = Path(__file__).with_suffix(".cpp")
_DRIVER = "libcuda.so.1"
_FUNCTIONS = {
    "gs_copy": "cuMemcpyAsync",
    "gs_write": "cuStreamWriteValue32_v2",
    "gs_wait": "cuStreamWaitValue32_v2",
    "gs_launch": "cuLaunchKernel",
}


class Operation(IntEnum):
    COPY = 0
    WRITE = 1
    WAIT = 2
    LAUNCH = 3


@cache
def load_queue() -> ctypes.CDLL:
    """The library that queues, built if need be.

    Raises:
        LoadErrors: of ``torch_library``; there is no compiler, or the driver lacks a function.
    """
    library = build_library(_SOURCE, cpp_enum(Operation))
    driver = ctypes.CDLL(_DRIVER)
    for name, symbol in _FUNCTIONS.items():
        ctypes.c_void_p.in_dll(library, name).value = ctypes.cast(
            getattr(driver, symbol), ctypes.c_void_p
        ).value
    library.gs_queue.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return library


class DriverQueue:
    """For one GPU. Raises what ``load_queue`` does."""

    def __init__(self) -> None:
        self._queue = load_queue().gs_queue
        self._words: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between contiguous tensors of one dtype and as many elements."""
        self._words += (Operation.COPY, target.data_ptr(), source.data_ptr(), source.nbytes)

    def write(self, address: int, value: int) -> None:
        """To a word that other GPUs may reach."""
        self._words += (Operation.WRITE, address, value)

    def wait(self, address: int, value: int) -> None:
        """Until what is there is at least the value, in the order of a clock of 32 bits."""
        self._words += (Operation.WAIT, address, value)

    def launch(self, kernel: BuiltKernel, *buffers: torch.Tensor) -> None:
        """A kernel that was built for this GPU.

        Raises:
            ValueError: it needs more than its addresses, or one of these is not aligned to 16 bytes.
        """
        addresses = [buffer.data_ptr() for buffer in buffers]
        launch = kernel.launch
        if launch is None or not kernel.address or launch.grid[2] != 1 or any(a & 15 for a in addresses):
            raise ValueError("the driver alone cannot launch this kernel")
        self._words += (
            Operation.LAUNCH,
            kernel.address,
            *launch.grid[:2],
            launch.threads,
            launch.shared_bytes,
        )
        self._words += (len(addresses), *addresses)

    def queue(self, stream: int) -> None:
        """What was noted.

        Args:
            stream: the driver's handle of it.

        Raises:
            RuntimeError: the driver cannot; nothing that is noted is left.
        """
        words, self._words = array("q", self._words), []
        if error := self._queue(words.buffer_info()[0], len(words), stream):
            raise RuntimeError(f"the driver cannot average gradients by copies (CUDA error {error})")
