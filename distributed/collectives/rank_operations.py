"""What a rank does to average a buffer with others."""

from __future__ import annotations

from typing import Protocol

import torch


class RankOperations(Protocol):
    """One behind the other; on a GPU, on one stream of it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between contiguous tensors of one dtype and as many elements, of this rank or of others."""
        ...

    def copy_rows(self, target: int, pitch_bytes: int, source: int, row_bytes: int, rows: int) -> None:
        """Rows that come to lie apart.

        Args:
            target: the address where the first row comes to lie; the others follow, each ``pitch_bytes`` behind the
                last.
            source: where they are, without gaps.
        """
        ...

    def meet(self) -> None:
        """Waits for all ranks."""
        ...

    def tell(self, number: int) -> None:
        """Between two meetings: behind the second, all others know this number of this rank."""
        ...

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        """Adds the second to the first, and divides that by a number."""
        ...

    def average_landed(self, means: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> None:
        """Of two ranks: the mean of what has landed and what this rank has; see ``narrow_average``.

        Args:
            means: where they come to lie, and where values have landed.
            own: as many elements, of ``dtype`` or of float32.
            dtype: of 16 bits.
        """
        ...
