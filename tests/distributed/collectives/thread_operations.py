"""The operations of ranks that are threads of one process, whose memory is the same."""

from __future__ import annotations

from threading import Barrier

import torch


class ThreadOperations:
    """Done at once.

    Args:
        barrier: of all ranks.
    """

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous()
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        target.copy_(source)

    def meet(self) -> None:
        self._barrier.wait(30)

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        part.copy_((part.double() + other.double()) / divisor)
