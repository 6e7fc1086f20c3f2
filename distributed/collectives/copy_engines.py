"""Averages buffers over the GPUs of one host by their copy engines.

NCCL's kernels hold multiprocessors for as long as the link works, and a backward beside them has fewer. A copy engine
needs none: of each buffer every rank pulls its own part from the others, averages it, which takes a short kernel, and
pushes the mean to the others. It sends and receives as much as in a ring. Before the pulls and after the pushes the
ranks' streams meet.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradsplit.distributed.collectives.gpu_operations import GpuOperations
from gradsplit.distributed.collectives.peer_access import reason_against
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer, share
from gradsplit.distributed.collectives.work import StreamWork
from gradsplit.distributed.streams import current_stream


class Scratch:
    """Works that run one after the other may use the same memory, as long as one of them still holds it."""

    def __init__(self) -> None:
        # By dtype, with the stream for which it was allocated.
        self._held: dict[torch.dtype, tuple[weakref.ref[torch.Tensor], object]] = {}

    def take(self, like: torch.Tensor, owner: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory like a one-dimensional tensor.

        Args:
            owner: the stream that is current, for which new memory is allocated. Other streams' is not shared: they
                wait for other works.

        Returns:
            What the work must hold until it is over, and the memory, which is a part of that.
        """
        reference, of_stream = self._held.get(like.dtype, (None, None))
        held = None if reference is None or of_stream is not owner else reference()
        if held is None or held.numel() < like.numel():
            held = torch.empty_like(like)
            self._held[like.dtype] = weakref.ref(held), owner
        return held, held[: like.numel()]


class RankOperations(Protocol):
    """One after the other; on a GPU, on one stream of it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between contiguous tensors of one dtype and as many elements, of this rank or of others."""
        ...

    def meet(self) -> None:
        """Waits for all ranks."""
        ...

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        """``part = (part + other) / divisor``; both contiguous, of one dtype and as many elements."""
        ...


# What is averaged to see whether it works, and how long it may take.
_TRIED_ELEMENTS = 2**18
_TRIED_S = 20.0


def find_engines(group: dist.ProcessGroup, device: torch.device) -> tuple[CopyEngines | None, str]:
    """The engines over this group, or why it has none. A collective; all ranks get the same answer."""
    if against := reason_against(group, device):
        return None, against
    engines = CopyEngines(group, device)
    # Nobody waits for a rank that cannot come so far.
    for tried in (engines.try_alone, engines.try_to_share, engines.try_to_average):
        faults: list[Any] = [None] * group.size()
        dist.all_gather_object(faults, _fault_of(tried), group=group)
        if against := next(filter(None, faults), ""):
            return None, against
    engines.leave_trials()
    return engines, ""


def _fault_of(tried: Callable[[], object]) -> str:
    """What goes wrong on this rank, or ""."""
    try:
        tried()
    except Exception as error:  # of drivers, containers that forbid to share memory, compilers
        return f"{type(error).__name__}: {error}"
    return ""


def average(
    flat: torch.Tensor,
    buffer: SharedBuffer,
    scratch: torch.Tensor,
    held: torch.Tensor | None,
    operations: RankOperations,
) -> None:
    """The mean over ranks of what each has in ``flat``, which comes there; called on all of them.

    Args:
        flat: ``[numel]``, the rank's own memory of the buffer, or other of its dtype: then the buffer keeps what it
            holds.
        buffer: by which ranks reach one another.
        scratch: like ``buffer.part``, this rank's share of the elements.
        held: where ``flat`` is other memory, memory like the buffer for what that holds.
        operations: of this rank.
    """
    mine, part, others = buffer.mine, buffer.part, buffer.part_on_others
    copy = operations.copy
    if held is not None:
        copy(held, mine)
        copy(mine, flat)
    operations.meet()
    for number, other in enumerate(others, start=1):
        divisor = len(buffer.of_ranks) if number == len(others) else 1
        copy(scratch, other)
        operations.add_and_divide(part, scratch, divisor)
    for other in others:
        copy(other, part)
    operations.meet()
    if held is not None:
        copy(flat, mine)
        copy(mine, held)


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
        self._operations: GpuOperations | None = None
        self._trial: SharedBuffer | None = None
        # The last that was started: when, and the event after it.
        self._last: tuple[float, Any] | None = None
        # Of the parts of others.
        self._scratch = Scratch()
        # After what a backward has stored in the bucket that is started.
        self._stored = torch.cuda.Event()

    def allocate(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """Zeros; a collective."""
        assert self._operations is not None
        self._operations.build(dtype)
        return share(numel, dtype, self._group, self._device)

    def start(self, flat: torch.Tensor, buffer: SharedBuffer) -> StreamWork:
        """Begins to average what the current stream has stored, or will have.

        Args:
            flat: where, ``[numel]``: the buffer's own memory, or other while the program holds views of that.
            buffer: what was allocated for it.
        """
        operations = self._operations
        assert operations is not None
        current = current_stream(self._device)
        # Of the current stream, since the backward has given up as much memory of activations by now.
        whole, scratch = self._scratch.take(buffer.part, current)
        held = None if flat is buffer.mine else torch.empty_like(flat)
        average(flat, buffer, scratch, held, operations)
        self._stored.record(current)
        self._stored.wait(self._stream)
        operations.queue(self._stream)
        done = self._stream.record_event()
        self._last = time.monotonic(), done
        used = [flat, whole]
        if held is not None:
            used.append(held)
            # What the program computes next may read its views of the buffer.
            current.wait_event(done)
        return StreamWork(done, self._stream, used)

    def try_alone(self) -> None:
        """What is missing here is raised here, before anything else: compilers, or what the driver should know."""
        self._operations = GpuOperations(self._device)
        self._operations.build(torch.float32)

    def try_to_share(self) -> None:
        """What goes wrong with the memory is raised here. A collective, before all others."""
        assert self._operations is not None
        self._trial = self.allocate(_TRIED_ELEMENTS, torch.float32)
        self._operations.join(self._group)
        self._operations.queue(self._stream)
        self._stream.synchronize()

    def try_to_average(self) -> None:
        """Raises RuntimeError where a host's settings keep GPUs from one another: copies may succeed then, and bring
        nothing. A collective, after ``try_to_share``."""
        trial, self._trial = self._trial, None
        assert trial is not None
        trial.mine.fill_(self._group.rank())
        work, deadline_s = self.start(trial.mine, trial), time.monotonic() + _TRIED_S
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                self.release_waits()
                raise RuntimeError("GPUs do not hear of one another")
            time.sleep(1e-3)
        if not bool((trial.mine == (self._group.size() - 1) / 2).all()):
            raise RuntimeError("copies between GPUs bring wrong values")

    def leave_trials(self) -> None:
        """Another stream is used from here on.

        On H200s, while the first stream by which a process had reached another GPU waited for anything, each kernel of
        all other streams began 1 us later: 0.4 ms of a GPT-2's step. None of eight later streams had that.
        """
        self._stream = torch.cuda.Stream(self._device)

    def late(self) -> str:
        """The message for all ranks if the last mean is under way for longer than a collective of the group may be, or
        ""; on any thread."""
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

    def release_waits(self) -> None:
        """No GPU waits for a rank that will not come; for another thread than the one that is blocked."""
        if self._operations is not None:
            self._operations.release_waits()


def _time_limit_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective may take before the group's watchdog ends the job."""
    backend: Any = group._get_backend(device)
    return backend.options._timeout.total_seconds()
