"""The mean over two ranks of gradients that are exact in 16 bits though the buffer has 32: cast behind the link.

Each rank takes its values aside and pushes all of them into the other's buffer. They land where the means come to lie,
block by block: the 16-bit values of a block in the first half of the block's place. So one kernel reads a block of both
and writes the means over what has landed, and no more memory is needed than what was taken aside.

A rank may have added something to its gradients, and then has 32 bits of each, without the other's knowing. It pushes
these, whose blocks fill their places, and says so by a word that the other's kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distributed.collectives.landed_mean import BLOCK
from distributed.collectives.shared_buffers import SharedBuffer

CopyRows = Callable[[int, int, int, int, int], object]
# Given the buffer with what has landed, and what this rank has itself.
AverageLanded = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class NarrowPart:
    """The elements at the beginning of a float32 buffer whose values are exact in 16 bits, as a rule.

    Attributes:
        numel: how many.
        dtype: of 16 bits.
    """

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class NarrowExchange:
    """One such mean.

    Attributes:
        part: of the buffer.
        buffer: where the means come to lie.
        values: what this rank has: 16 bits of each, or 32. They may lie in the buffer.
        own: memory for them elsewhere.
        copy_rows: as ``copy_rows.py`` has it.
        tell: tells the other rank a number, which it may read behind the next meeting.
        average_landed: computes, once the ranks have met.
    """

    part: NarrowPart
    buffer: SharedBuffer
    values: torch.Tensor
    own: torch.Tensor
    copy_rows: CopyRows
    tell: Callable[[int], object]
    average_landed: AverageLanded

    def take_aside(self) -> None:
        """Called first: the buffer is free then."""
        self.own.copy_(self.values)

    def send(self) -> None:
        """Called when the other's buffer is free."""
        target = self.buffer.of_ranks[1 - self.buffer.rank]
        if self.own.dtype == target.dtype:
            target[: self.part.numel].copy_(self.own)
        else:
            whole, rest = divmod(self.part.numel, BLOCK)
            for begin, numel, rows in ((0, BLOCK, whole), (whole * BLOCK, rest, 1)):
                if numel and rows:
                    place = target.data_ptr() + begin * target.itemsize
                    values = self.own.data_ptr() + begin * self.own.itemsize
                    self.copy_rows(place, BLOCK * target.itemsize, values, numel * self.own.itemsize, rows)
        self.tell(self.own.itemsize)

    def receive(self) -> None:
        """Called when the other has sent."""
        self.average_landed(self.buffer.mine[: self.part.numel], self.own)
