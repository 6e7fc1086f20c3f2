"""The mean over two ranks of gradients that are exact in 16 bits though the buffer has 32: cast behind the link.

Each rank takes its values aside and pushes all of them into the other's buffer. They land where the means come to lie,
block by block: the 16-bit values of a block in the first half of the block's place. So one kernel reads a block of both
and writes the means over what has landed, and no more memory is needed than what was taken aside.

A rank may have added something to its gradients, and then has 32 bits of each, without the other's knowing. It pushes
these, whose blocks fill their places, and says so by a word that the other's kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distributed.collectives.landed_mean import BLOCK
from distributed.collectives.rank_operations import RankOperations
from distributed.collectives.shared_buffers import SharedBuffer


@dataclass(frozen=True)
class NarrowExchange:
    """One such mean.

    Attributes:
        buffer: with a narrow part, where the means come to lie.
        values: what this rank has: 16 bits of each, or 32. They may lie in the buffer.
        own: memory for them elsewhere.
        operations: of this rank.
    """

    buffer: SharedBuffer
    values: torch.Tensor
    own: torch.Tensor
    operations: RankOperations

    def take_aside(self) -> None:
        """Called first: the buffer is free then."""
        self.operations.copy(self.own, self.values)

    def send(self) -> None:
        """Called when the other's buffer is free."""
        own, target = self.own, self.buffer.of_ranks[1 - self.buffer.rank]
        itemsize, own_itemsize = target.itemsize, own.itemsize
        if own_itemsize == itemsize:
            self.operations.copy(target[: own.numel()], own)
        else:
            whole, rest = divmod(own.numel(), BLOCK)
            for begin, numel, rows in ((0, BLOCK, whole), (whole * BLOCK, rest, 1)):
                if numel and rows:
                    place, values = (
                        target.data_ptr() + begin * itemsize,
                        own.data_ptr() + begin * own_itemsize,
                    )
                    self.operations.copy_rows(place, BLOCK * itemsize, values, numel * own_itemsize, rows)
        self.operations.tell(own_itemsize)

    def receive(self) -> None:
        """Called when the other has sent."""
        assert self.buffer.narrow is not None
        self.operations.average_landed(self.buffer.narrow_memory, self.own, self.buffer.narrow.dtype)
