"""Memory of GPUs that other ranks' GPUs reach, in torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory


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

    def first(self, numel: int) -> SharedBuffer:
        """The part of it with so many elements at the beginning."""
        return SharedBuffer([memory[:numel] for memory in self.of_ranks], self.rank, self.handle)


def share(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> SharedBuffer:
    """Zeros, on all ranks; a collective."""
    # Not ``symm_mem.empty``, whose pool hands freed memory out again, perhaps in another order on another rank.
    mine = _SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device).zero_()
    torch.cuda.current_stream(device).synchronize()
    handle = _SymmetricMemory.rendezvous(mine, group.group_name)
    rank = group.rank()
    ranks = range(group.size())
    return SharedBuffer(
        [mine if other == rank else handle.get_buffer(other, (numel,), dtype) for other in ranks],
        rank,
        handle,
    )
