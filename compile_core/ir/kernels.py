"""Generated source code, and what it takes to call it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSource:
    """Source text of one loop nest for one kind of device.

    Attributes:
        name: the symbol to call.
        language: ``"cpp"`` or ``"triton"``.
        text: the function alone; the builder adds the language's prelude.
        buffers: the nest's buffers in the order of the kernel's pointer arguments.
        grid: Triton: number of programs along each of three dims; C++: empty.
        meta: Triton: compile-time settings in a fixed order, such as ``("num_warps", 4)``; C++: empty.
    """

    name: str
    language: str
    text: str
    buffers: tuple[str, ...]
    grid: tuple[int, ...] = ()
    meta: tuple[tuple[str, int], ...] = ()
