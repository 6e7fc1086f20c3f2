"""What a rank does to average a buffer with others."""

from __future__ import annotations

from typing import Protocol

import torch


class RankOperations(Protocol):
    """One after the other; on a GPU, on one stream of it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between contiguous tensors of one dtype and as many elements, of this rank or of others."""
        ...

    def meet(self) -> None:
        """Waits for all ranks."""
        ...

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        """Adds the second to the first, and divides that by a number."""
        ...
