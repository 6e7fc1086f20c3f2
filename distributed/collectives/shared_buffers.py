"""Memory of GPUs that other ranks' GPUs reach, in torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.torch_facts.process_groups import SymmetricMemory

# At which parts begin, so that copies and kernels find them aligned.
_ALIGNMENT_ELEMENTS = 64


@dataclass(frozen=True)
class SharedBuffer:
    """One-dimensional memory that every rank has, and reaches of every other.

    Attributes:
        of_ranks: each rank's, this one's own included.
        rank: whose this process is.
        handle: keeps the others' reachable.
    """

    of_ranks: Sequence[torch.Tensor]
    rank: int
    handle: Any = None

    @property
    def mine(self) -> torch.Tensor:
        return self.of_ranks[self.rank]

    @property
    def is_shared(self) -> bool:
        """Whether it is reached by others at all."""
        return len(self.of_ranks) > 1

    @property
    def part(self) -> torch.Tensor:
        """The elements that this rank averages for all; maybe none."""
        # Not kept: who looks for a program's views of this memory would take it for one.
        return self.mine[self._part]

    @cached_property
    def part_on_others(self) -> Sequence[torch.Tensor]:
        """The same of the other ranks. Each begins with another, so that they do not all use one link at once."""
        ranks, part = len(self.of_ranks), self._part
        if part.start == part.stop:
            return []
        return [self.of_ranks[(self.rank + step) % ranks][part] for step in range(1, ranks)]

    @cached_property
    def _part(self) -> slice:
        return slice(*part_of(self.mine.numel(), len(self.of_ranks), self.rank))

    def first(self, numel: int) -> SharedBuffer:
        """The part of it with so many elements at the beginning."""
        return SharedBuffer([memory[:numel] for memory in self.of_ranks], self.rank, self.handle)


def part_of(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's part of so many elements begins and ends; the last ones may be shorter or empty."""
    size = -(-numel // (ranks * _ALIGNMENT_ELEMENTS)) * _ALIGNMENT_ELEMENTS
    return min(rank * size, numel), min((rank + 1) * size, numel)


def share(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> SharedBuffer:
    """Zeros, on all ranks; a collective."""
    # Not ``symm_mem.empty``, whose pool hands freed memory out again, perhaps in another order on another rank.
    mine = SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device).zero_()
    torch.cuda.current_stream(device).synchronize()
    handle = SymmetricMemory.rendezvous(mine, group.group_name)
    rank = group.rank()
    ranks = range(group.size())
    return SharedBuffer(
        [mine if other == rank else handle.get_buffer(other, (numel,), dtype) for other in ranks],
        rank,
        handle,
    )
