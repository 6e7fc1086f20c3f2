"""Generated source code, and what it takes to call it."""

from __future__ import annotations

from dataclasses import dataclass

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
        bases: how many elements behind each buffer's beginning its argument points; empty for none.
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
