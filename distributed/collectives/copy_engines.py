"""Adds buffers up over the GPUs of one host by their copy engines.

NCCL's kernels hold multiprocessors for as long as the link works, and a backward beside them has fewer. A copy engine
needs none: of each buffer every rank pulls its own part from the others, adds these up, which takes a short kernel, and
pushes the sum to the others. It sends and receives as much as in a ring. Before the pulls and behind the pushes ranks
wait for one another in an all-reduce of one number; so one that does not come is waited for, noticed and aborted as in
any other collective of the process group.

The buffers lie in torch's symmetric memory, where each rank reaches those of the others.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from distributed.collectives.work import StreamWork
from distributed.group_backend import backend_of

# At which parts begin, so that copies and kernels find them aligned.
_ALIGNMENT_ELEMENTS = 64
# Tells hosts of one name apart.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


@dataclass(frozen=True)
class _Place:
    """What ranks must know of one another before they share memory."""

    host: str
    device: int | None
    reachable: frozenset[int]
    backend: str


def reason_against(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks of this group cannot share memory, or "". A collective; all ranks get the same answer."""
    boot_id = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    others = (index for index in range(count) if index != device.index)
    reachable = frozenset(
        index for index in others if torch.cuda.can_device_access_peer(device.index or 0, index)
    )
    mine = _Place(socket.gethostname() + boot_id, device.index, reachable, backend_of(group, device))
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return _reason_of(found)


def _reason_of(places: Sequence[_Place]) -> str:
    """The same, of the places of all ranks."""
    if any(place.backend != "nccl" for place in places):
        return "the process group is not NCCL's"
    if len({place.host for place in places}) > 1:
        return "ranks are on several hosts"
    devices = {place.device for place in places}
    if len(devices) < len(places):
        return "each process sees its GPU alone"
    for place in places:
        if missing := devices - place.reachable - {place.device}:
            return f"GPU {place.device} does not reach the memory of GPU {min(map(str, missing))}"
    return ""


def add_up(buffer: SharedBuffer, scratch: torch.Tensor, meet: Callable[[], object]) -> None:
    """Sums over ranks, in all of their buffers; called on all of them.

    Args:
        buffer: what is added up.
        scratch: of the buffer's dtype, with at least as many elements as a part: those of the buffer over the ranks.
        meet: waits for all ranks; on a GPU, the stream on which this is called does.
    """
    begin, end = _part(buffer.mine.numel(), len(buffer.of_ranks), buffer.rank)
    part = buffer.mine[begin:end]
    others = [memory[begin:end] for memory in _others(buffer)]
    meet()
    for other in others:
        part.add_(scratch[: end - begin].copy_(other))
    for other in others:
        other.copy_(part)
    meet()


def add_up_elsewhere(
    flat: torch.Tensor, buffer: SharedBuffer, scratch: torch.Tensor, meet: Callable[[], object]
) -> None:
    """The same of what this rank has in ``flat``, and the sum comes there; the buffer keeps what it holds."""
    held = buffer.mine.clone()
    buffer.mine.copy_(flat)
    add_up(buffer, scratch, meet)
    flat.copy_(buffer.mine)
    buffer.mine.copy_(held)


def part_numel(numel: int, ranks: int) -> int:
    """Of the largest part."""
    begin, end = _part(numel, ranks, 0)
    return end - begin


def _part(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where the part begins and ends that this rank adds up; the last ones may be shorter or empty."""
    size = -(-numel // (ranks * _ALIGNMENT_ELEMENTS)) * _ALIGNMENT_ELEMENTS
    return min(rank * size, numel), min((rank + 1) * size, numel)


def _others(buffer: SharedBuffer) -> list[torch.Tensor]:
    """Each rank begins with another, so that no link is asked for by all."""
    ranks = len(buffer.of_ranks)
    return [buffer.of_ranks[(buffer.rank + step) % ranks] for step in range(1, ranks)]


class CopyEngines:
    """Adds up the buffers of one module; for GPUs of which ``reason_against`` has none.

    Args:
        group: over which ranks.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._token = torch.zeros(1, device=device)
        self._options = dist.AllreduceOptions()
        # On the stream of the copies, not on NCCL's own.
        self._options.asyncOp = False

    def allocate(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """Zeros; a collective."""
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
        """Begins to add up what the current stream has stored, or will have.

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
                add_up(buffer, scratch, self._meet)
            else:
                add_up_elsewhere(flat, buffer, scratch, self._meet)
            done = self._stream.record_event()
        if flat is not buffer.mine:
            # What the program computes next may read its views of the buffer.
            current.wait_event(done)
        return StreamWork(done, scratch)

    def _meet(self) -> None:
        self._group.allreduce([self._token], self._options)
