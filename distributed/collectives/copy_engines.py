"""Averages buffers over the GPUs of one host by their copy engines.

NCCL's kernels hold multiprocessors for as long as the link works, and a backward beside them has fewer. A copy engine
needs none: of each buffer every rank pulls its own part from the others, averages it, which takes a short kernel, and
pushes the mean to the others. It sends and receives as much as in a ring. Before the pulls and behind the pushes ranks
wait for one another in an all-reduce of one number; so one that does not come is waited for, noticed and aborted as in
any other collective of the process group.

The buffers lie in torch's symmetric memory, where each rank reaches those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from distributed.collectives.mean_kernel import MeanKernel
from distributed.collectives.peer_access import reason_against
from distributed.collectives.work import StreamWork

# At which parts begin, so that copies and kernels find them aligned.
_ALIGNMENT_ELEMENTS = 64
# What is averaged to see whether it works.
_TRIED_ELEMENTS = 2**18


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


def find_engines(group: dist.ProcessGroup, device: torch.device) -> tuple[CopyEngines | None, str]:
    """The engines over this group, or why it has none. A collective; all ranks get the same answer."""
    if against := reason_against(group, device):
        return None, against
    engines = CopyEngines(group, device)
    # Nobody waits on a GPU for a rank that could not even share.
    for tried in (engines.try_to_share, engines.try_to_average):
        faults: list[Any] = [None] * group.size()
        dist.all_gather_object(faults, _fault_of(tried), group=group)
        if against := next(filter(None, faults), ""):
            return None, against
    return engines, ""


def _fault_of(tried: Callable[[], object]) -> str:
    """What goes wrong on this rank, or ""."""
    try:
        tried()
    except Exception as error:  # of drivers, containers that forbid to share memory, compilers
        return f"{type(error).__name__}: {error}"
    return ""


# Adds the second to the first, and divides that by a number.
AddAndDivide = Callable[[torch.Tensor, torch.Tensor, int], object]


def average(
    buffer: SharedBuffer, scratch: torch.Tensor, meet: Callable[[], object], add_and_divide: AddAndDivide
) -> None:
    """The mean over ranks, in all of their buffers; called on all of them.

    Args:
        buffer: what is averaged.
        scratch: of the buffer's dtype, with at least as many elements as a part: those of the buffer over the ranks.
        meet: waits for all ranks; on a GPU, the stream on which this is called does.
        add_and_divide: computes.
    """
    begin, end = _part(buffer.mine.numel(), len(buffer.of_ranks), buffer.rank)
    part = buffer.mine[begin:end]
    others = [memory[begin:end] for memory in _others(buffer)]
    meet()
    for number, other in enumerate(others, start=1):
        divisor = len(buffer.of_ranks) if number == len(others) else 1
        add_and_divide(part, scratch[: end - begin].copy_(other), divisor)
    for other in others:
        other.copy_(part)
    meet()


def average_elsewhere(
    flat: torch.Tensor,
    buffer: SharedBuffer,
    scratch: torch.Tensor,
    meet: Callable[[], object],
    add_and_divide: AddAndDivide,
) -> None:
    """The same of what this rank has in ``flat``, and the mean comes there; the buffer keeps what it holds."""
    held = buffer.mine.clone()
    buffer.mine.copy_(flat)
    average(buffer, scratch, meet, add_and_divide)
    flat.copy_(buffer.mine)
    buffer.mine.copy_(held)


def part_numel(numel: int, ranks: int) -> int:
    """Of the largest part."""
    begin, end = _part(numel, ranks, 0)
    return end - begin


def _part(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where the part begins and ends that this rank averages; the last ones may be shorter or empty."""
    size = -(-numel // (ranks * _ALIGNMENT_ELEMENTS)) * _ALIGNMENT_ELEMENTS
    return min(rank * size, numel), min((rank + 1) * size, numel)


def _others(buffer: SharedBuffer) -> list[torch.Tensor]:
    """Each rank begins with another, so that no link is asked for by all."""
    ranks = len(buffer.of_ranks)
    return [buffer.of_ranks[(buffer.rank + step) % ranks] for step in range(1, ranks)]


class CopyEngines:
    """Averages the buffers of one module; for GPUs that ``reason_against`` has no reason against.

    Args:
        group: over which ranks.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._add_and_divide = MeanKernel(device)
        self._token = torch.zeros(1, device=device)
        self._trial: SharedBuffer | None = None
        self._options = dist.AllreduceOptions()
        # On the stream of the copies, not on NCCL's own.
        self._options.asyncOp = False

    def allocate(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """Zeros; a collective."""
        self._add_and_divide.build(dtype)
        # Not ``symm_mem.empty``, whose pool hands freed memory out again, perhaps in another order on another rank.
        mine = _SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, self._device)
        handle = _SymmetricMemory.rendezvous(mine.zero_(), self._group.group_name)
        rank = self._group.rank()
        of_ranks = [
            mine if other == rank else handle.get_buffer(other, (numel,), dtype)
            for other in range(self._group.size())
        ]
        return SharedBuffer(of_ranks, rank, handle)

    def start(self, flat: torch.Tensor, buffer: SharedBuffer) -> StreamWork:
        """Begins to average what the current stream has stored, or will have.

        Args:
            flat: where: the buffer's own memory, or other while the program holds views of that.
            buffer: what was allocated for it.
        """
        current = torch.cuda.current_stream(self._device)
        # Of the current stream, since the backward has given up as much memory of activations by now.
        scratch = flat.new_empty(part_numel(flat.numel(), len(buffer.of_ranks)))
        # Should a backward break off, nobody waits for the copies.
        for used in (flat, scratch):
            used.record_stream(self._stream)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if flat is buffer.mine:
                average(buffer, scratch, self._meet, self._add_and_divide)
            else:
                average_elsewhere(flat, buffer, scratch, self._meet, self._add_and_divide)
            done = self._stream.record_event()
        if flat is not buffer.mine:
            # What the program computes next may read its views of the buffer.
            current.wait_event(done)
        return StreamWork(done, scratch)

    def try_to_share(self) -> None:
        """What goes wrong with the memory is raised here. A collective."""
        self._trial = self.allocate(_TRIED_ELEMENTS, torch.float32)

    def try_to_average(self) -> None:
        """Raises RuntimeError where a host's settings keep GPUs from one another: copies may succeed then, and bring
        nothing. A collective, behind ``try_to_share``."""
        trial, self._trial = self._trial, None
        assert trial is not None
        trial.mine.fill_(self._group.rank())
        self.start(trial.mine, trial).wait()
        if not bool((trial.mine == (self._group.size() - 1) / 2).all()):
            raise RuntimeError("copies between GPUs bring wrong values")

    def _meet(self) -> None:
        self._group.allreduce([self._token], self._options)
