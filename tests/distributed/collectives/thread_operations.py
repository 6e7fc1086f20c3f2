"""The operations of ranks that are threads of one process, whose memory is the same."""

from __future__ import annotations

import ctypes
from threading import Barrier

import torch

from distributed.collectives.landed_mean import BLOCK


class ThreadOperations:
    """Done at once.

    Args:
        barrier: of all ranks.
        rank: whose they are.
        told: of two ranks what each was told last.
    """

    def __init__(self, barrier: Barrier, rank: int = 0, told: list[int] | None = None) -> None:
        self._barrier, self._rank, self._told = barrier, rank, told or []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous()
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        target.copy_(source)

    def copy_rows(self, target: int, pitch_bytes: int, source: int, row_bytes: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch_bytes, source + row * row_bytes, row_bytes)

    def meet(self) -> None:
        self._barrier.wait(30)

    def tell(self, number: int) -> None:
        self._told[1 - self._rank] = number

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        part.copy_((part.double() + other.double()) / divisor)

    def average_landed(self, means: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> None:
        """As the kernel does, block by block."""
        landed = means.clone()
        if self._told[self._rank] == 2:
            halves = means.view(dtype)
            for begin in range(0, means.numel(), BLOCK):
                end = min(begin + BLOCK, means.numel())
                landed[begin:end] = halves[2 * begin : begin + end]
        means.copy_((landed + own) / 2)
