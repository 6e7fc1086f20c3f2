"""Averages buffers over the GPUs of one host by their copy engines.

NCCL's kernels hold multiprocessors for as long as the link works, and a backward beside them has fewer. A copy engine
needs none: of each buffer every rank pulls its own part from the others, averages it, which takes a short kernel, and
pushes the mean to the others. It sends and receives as much as in a ring. Before the pulls and behind the pushes the
ranks' streams meet.

What is exact in 16 bits is sent as such, once (``narrow_average``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distributed.collectives.copy_rows import copy_rows
from distributed.collectives.landed_mean import LandedMean
from distributed.collectives.mean_kernel import MeanKernel
from distributed.collectives.narrow_average import NarrowExchange, NarrowPart
from distributed.collectives.peer_access import reason_against
from distributed.collectives.shared_buffers import SharedBuffer, share
from distributed.collectives.stream_meeting import StreamMeeting, load_driver
from distributed.collectives.work import StreamWork

# At which parts begin, so that copies and kernels find them aligned.
_ALIGNMENT_ELEMENTS = 64
# What is averaged to see whether it works, and how long it may take.
_TRIED_ELEMENTS = 2**18
_TRIED_S = 20.0


def find_engines(
    group: dist.ProcessGroup, device: torch.device, sends_narrow: bool
) -> tuple[CopyEngines | None, str]:
    """The engines over this group, or why it has none. A collective; all ranks get the same answer.

    Args:
        sends_narrow: buffers may have a ``NarrowPart``; only between two ranks.
    """
    if against := reason_against(group, device):
        return None, against
    engines = CopyEngines(group, device, sends_narrow)
    # Nobody waits for a rank that cannot come so far.
    for tried in (engines.try_alone, engines.try_to_share, engines.try_to_average):
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
    flat: torch.Tensor,
    buffer: SharedBuffer,
    scratch: torch.Tensor,
    meet: Callable[[], object],
    add_and_divide: AddAndDivide,
    exchange: NarrowExchange | None = None,
) -> None:
    """The mean over ranks of what each has in ``flat``, which comes there; called on all of them.

    Args:
        flat: the rank's own memory of the buffer, or other: then the buffer keeps what it holds.
        buffer: by which ranks reach one another.
        scratch: of the buffer's dtype, with at least as many elements as a part: those of the buffer over the ranks.
        meet: waits for all ranks; on a GPU, the stream on which this is called does.
        add_and_divide: computes.
        exchange: of the elements at the beginning, if these are averaged in that way.
    """
    mine, count = buffer.mine, 0 if exchange is None else exchange.part.numel
    held = None if flat is mine else mine.clone()
    if held is not None:
        mine[count:].copy_(flat[count:])
    begin, end = _part(mine.numel() - count, len(buffer.of_ranks), buffer.rank)
    part = mine[count + begin : count + end]
    others = [memory[count + begin : count + end] for memory in _others(buffer)] if begin < end else []
    if exchange is not None:
        exchange.take_aside()
    meet()
    if exchange is not None:
        exchange.send()
    for number, other in enumerate(others, start=1):
        divisor = len(buffer.of_ranks) if number == len(others) else 1
        add_and_divide(part, scratch[: end - begin].copy_(other), divisor)
    for other in others:
        other.copy_(part)
    meet()
    if exchange is not None:
        exchange.receive()
    if held is not None:
        flat.copy_(mine)
        mine.copy_(held)


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
        sends_narrow: see ``find_engines``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sends_narrow: bool) -> None:
        self._group = group
        self._device = device
        self._sends_narrow = sends_narrow
        self._stream = torch.cuda.Stream(device)
        self._add_and_divide = MeanKernel(device)
        self._landed_mean = LandedMean(device)
        self._meet: StreamMeeting | None = None
        self._trial: SharedBuffer | None = None
        # The last that was started: when, and the event behind it.
        self._last: tuple[float, Any] | None = None

    def allocate(self, numel: int, dtype: torch.dtype, narrow: NarrowPart | None = None) -> SharedBuffer:
        """Zeros; a collective.

        Args:
            narrow: what of it will come in 16 bits.
        """
        self._add_and_divide.build(dtype)
        if narrow is not None:
            self._landed_mean.build(narrow.dtype)
        return share(numel, dtype, self._group, self._device)

    def start(
        self,
        flat: torch.Tensor,
        buffer: SharedBuffer,
        narrow: NarrowPart | None = None,
        values: torch.Tensor | None = None,
    ) -> StreamWork:
        """Begins to average what the current stream has stored, or will have.

        Args:
            flat: where: the buffer's own memory, or other while the program holds views of that.
            buffer: what was allocated for it.
            narrow: as then.
            values: those of the narrow part in 16 bits, if it has no 32; they may lie in its memory.
        """
        assert self._meet is not None
        current = torch.cuda.current_stream(self._device)
        count = 0 if narrow is None else narrow.numel
        # Of the current stream, since the backward has given up as much memory of activations by now.
        scratch = flat.new_empty(part_numel(flat.numel() - count, len(buffer.of_ranks)))
        exchange, used = None, [flat, scratch]
        if narrow is not None:
            values = flat[:count] if values is None else values
            own = torch.empty_like(values)
            told = self._meet.told_by(1 - buffer.rank)
            average_landed = functools.partial(self._landed_mean, told=told, dtype=narrow.dtype)
            exchange = NarrowExchange(narrow, buffer, values, own, copy_rows, self._meet.tell, average_landed)
            used += [values, own]
        # Should a backward break off, nobody waits for the copies.
        for memory in used:
            memory.record_stream(self._stream)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            average(flat, buffer, scratch, self._meet, self._add_and_divide, exchange)
            done = self._stream.record_event()
        self._last = time.monotonic(), done
        if flat is not buffer.mine:
            # What the program computes next may read its views of the buffer.
            current.wait_event(done)
        return StreamWork(done, scratch)

    def try_alone(self) -> None:
        """What is missing here is raised here, before anything else: compilers, or what the driver should know."""
        self._add_and_divide.build(torch.float32)
        if self._sends_narrow:
            self._landed_mean.build(torch.bfloat16)
        load_driver()

    def try_to_share(self) -> None:
        """What goes wrong with the memory is raised here. A collective, before all others."""
        self._trial = self.allocate(_TRIED_ELEMENTS, torch.float32)
        self._meet = StreamMeeting(self._group, self._device, self._stream)
        self._meet.rehearse()
        self._stream.synchronize()

    def try_to_average(self) -> None:
        """Raises RuntimeError where a host's settings keep GPUs from one another: copies may succeed then, and bring
        nothing. A collective, behind ``try_to_share``."""
        trial, self._trial = self._trial, None
        assert trial is not None
        parts: list[NarrowPart | None] = [None]
        if self._sends_narrow:
            parts.append(NarrowPart(trial.mine.numel() // 2 + 16, torch.bfloat16))
        for narrow in parts:
            trial.mine.fill_(self._group.rank())
            # Of one rank they are in 16 bits, and of the other one not.
            values = None
            if narrow is not None and self._group.rank() == 1:
                values = trial.mine[: narrow.numel].to(narrow.dtype)
            work, deadline_s = self.start(trial.mine, trial, narrow, values), time.monotonic() + _TRIED_S
            while not work.is_completed():
                if time.monotonic() > deadline_s:
                    self.let_go()
                    raise RuntimeError("GPUs do not hear of one another")
                time.sleep(1e-3)
            if not bool((trial.mine == (self._group.size() - 1) / 2).all()):
                raise RuntimeError("copies between GPUs bring wrong values")

    def late(self) -> str:
        """What every rank is told if the last mean is under way for longer than a collective of the group may be; on
        any thread."""
        if (last := self._last) is None:
            return ""
        started_s, done = last
        limit_s = _time_limit_s(self._group, self._device)
        # Until then the event is left alone: while a graph is recorded a question might spoil that.
        if time.monotonic() - started_s < limit_s:
            return ""
        if done.query():
            if self._last is last:
                self._last = None
            return ""
        return (
            f"the GPU of rank {dist.get_rank()} waited for {limit_s:g} s, the process group's timeout, to average "
            f"gradients with the others: one of them has ended, or does not run as many backwards"
        )

    def let_go(self) -> None:
        """No GPU waits for a rank that will not come; for another thread than the one that is blocked."""
        if self._meet is not None:
            self._meet.let_go()


def _time_limit_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective may take before the group's watchdog ends the job."""
    backend: Any = group._get_backend(device)
    return backend.options._timeout.total_seconds()
