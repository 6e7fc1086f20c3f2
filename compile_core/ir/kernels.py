"""Generated source code, and what it takes to call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

# Stands for the kernel's name in its text. The builder puts a name there, so that kernels that differ only in
# what they are called are one kernel to it.
KERNEL_SYMBOL = "gradsplit_kernel"


@dataclass(frozen=True)
class KernelSource:
    """Source text of one loop nest for one kind of device.

    Attributes:
        name: what people call it: the nest's name.
        language: ``"cpp"`` or ``"triton"``.
        text: the function alone, named ``KERNEL_SYMBOL``; the builder adds the language's prelude.
        buffers: the nest's buffers in the order of the kernel's pointer arguments.
        bases: the offset of each argument from its buffer's beginning, in elements; empty for none.
        device: where it runs.
        pointers: Triton: type of each pointer argument, such as ``"*fp32"``; C++: empty.
        grid: Triton: number of programs along each of three dims; C++: empty.
        meta: Triton: launch settings in a fixed order, such as ``("num_warps", 4)``; C++: empty.
    """

    name: str
    language: str
    text: str
    buffers: tuple[str, ...]
    device: torch.device
    bases: tuple[int, ...] = ()
    pointers: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    meta: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class CudaLaunch:
    """How a CUDA kernel is launched.

    Attributes:
        device: with its index.
        grid: number of blocks along each of three dims.
        threads: of a block.
        shared_bytes: of a block's shared memory.
    """

    device: torch.device
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that runs, called with the tensors of its source's buffers or with their addresses.

    Attributes:
        call: the function itself, which saves a call.
        address: of what runs without Python, or 0: a C function of an array of addresses, which returns 0 unless an
            index was out of range; with a ``launch``, the driver's handle of a kernel, which takes addresses aligned to
            16 bytes.
    """

    call: Callable[..., None]
    address: int
    launch: CudaLaunch | None = None

    def __call__(self, *buffers: Any) -> None:
        self.call(*buffers)


@dataclass(frozen=True)
class StartedBuild:
    """Kernels that are being compiled; called, it waits for them, loads them and returns them by name.

    Attributes:
        compiling: done when they have been compiled.
        load: what a call does.
    """

    compiling: Sequence[Future[Any]]
    load: Callable[[], Mapping[str, BuiltKernel]]

    def __call__(self) -> Mapping[str, BuiltKernel]:
        return self.load()

    def settle(self) -> None:
        """Waits until there is nothing left to wait for, in whatever thread; errors are for who loads."""
        wait(self.compiling)
