"""How a bucket is averaged over ranks: as it is, in fewer bits on the wire, or by copies between the GPUs of a host.

Compression is what stock DDP has as ``bf16_compress_hook``: gradients are rounded to 16 bits once, the collective adds
in 16 bits, and the mean is a float32 gradient again. They are divided before they are rounded; the hook does it after,
which gives the same bits where the number of ranks is a power of two and no value is subnormal in 16 bits.

On a GPU both casts run beside the backward, each on a stream of its own, so that no bucket waits for the casts of the
one before. A wire buffer lives from the start of its collective to the end of the round: when buckets are started, the
backward has given up that much memory of activations, so the peak of a step is not higher.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.distributed.collectives.copy_engines import CopyEngines, find_engines
from gradsplit.distributed.collectives.mean_kernel import AVERAGED_TYPES
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer
from gradsplit.distributed.collectives.work import StreamWork, Work
from gradsplit.distributed.group_backend import backend_of
from gradsplit.distributed.streams import current_stream

logger = logging.getLogger(__name__)

WIRE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# By default smaller buckets are NCCL's: copies were measured with these.
_LEAST_COPIED_BYTES = 2**20
# And those of more ranks: it was measured with two.
_MOST_COPYING_RANKS = 2


class Averaging:
    """Starts the collectives of one module's buckets.

    Args:
        group: over which ranks.
        device: where buckets lie.
        compression: a key of ``WIRE_TYPES``, in which float32 buckets travel; ``None`` for their own type.
        copy_engines: buckets are averaged by copies where the ranks' GPUs reach one another; not with ``compression``.
            ``None``: the large ones of two ranks.

    Attributes:
        on_streams: collectives are ordered by streams, not waited for by the host.
        factor: what a gradient must be multiplied with when it is stored, so that the reduced bucket is the mean over
            ranks. 1 where the collective itself averages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        compression: str | None = None,
        copy_engines: bool | None = False,
    ) -> None:
        self.on_streams = backend_of(group, device) == "nccl"
        self.factor = 1.0 if self.on_streams else 1.0 / group.size()
        self._group = group
        self._device = device
        self._wire_type = None if compression is None else WIRE_TYPES[compression]
        self._copy_engines = copy_engines if compression is None else False
        self._least_copied_bytes = _LEAST_COPIED_BYTES if copy_engines is None else 0
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if self.on_streams else dist.ReduceOp.SUM)
        self._sum_options = dist.AllreduceOptions()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def __str__(self) -> str:
        """What ranks must have in common."""
        copied = {None: "large ones between two", True: "all", False: "none"}[self._copy_engines]
        wire = str(self._wire_type or torch.float32).removeprefix("torch.")
        return f"float32 is sent as {wire}, buckets by copy engines: {copied}"

    def wire_bytes(self, flat: torch.Tensor) -> int:
        """The bytes that are sent of a one-dimensional buffer, in its dtype or that of ``gradient_compression``."""
        wire_type = self._wire_type if self._compresses(flat) else None
        return flat.numel() * (wire_type or flat.dtype).itemsize

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> SharedBuffer:
        """Zeros to store a bucket in; all ranks ask for theirs in one order."""
        # Other devices are those of modules that are spread over several.
        fits = device == self._device and dtype in AVERAGED_TYPES
        is_large = numel * dtype.itemsize >= self._least_copied_bytes
        if fits and is_large and self._engines is not None:
            return self._engines.allocate(numel, dtype)
        return SharedBuffer([torch.zeros(numel, dtype=dtype, device=device)], 0)

    def start(self, flat: torch.Tensor, buffer: SharedBuffer) -> Work:
        """Begins to average a bucket in place; its gradients are stored, or will be by what is queued already.

        Args:
            flat: where they are: one-dimensional, contiguous, of any dtype and device that the group reduces.
            buffer: what was allocated for the bucket; ``flat`` is other memory if the program has views of that.
        """
        if self._is_copied(buffer) and self._engines is not None:
            return self._engines.start(flat, buffer)
        if not self._compresses(flat):
            return self._group.allreduce([flat], self._options)
        return self._start_on_streams(flat) if self.on_streams else self._start_on_host(flat)

    def late(self) -> str:
        """What waits for other ranks beside the group's own collectives, and has for too long; or ""."""
        return "" if (engines := self._found_engines()) is None else engines.late()

    def release_waits(self) -> None:
        """The job has failed: nothing waits for other ranks any longer but the group's own collectives."""
        if (engines := self._found_engines()) is not None:
            engines.release_waits()

    def _found_engines(self) -> CopyEngines | None:
        return self.__dict__.get("_engines")

    @cached_property
    def _engines(self) -> CopyEngines | None:
        """Asks all ranks, at the first bucket that they would serve."""
        if not self._may_copy:
            return None
        engines, against = find_engines(self._group, self._device)
        if against:
            level = logging.INFO if self._copy_engines is None else logging.WARNING
            logger.log(level, "gradients are not averaged by copy engines: %s", against)
        return engines

    @property
    def _may_copy(self) -> bool:
        is_measured = self.on_streams and self._group.size() <= _MOST_COPYING_RANKS
        return is_measured if self._copy_engines is None else self._copy_engines

    def _is_copied(self, buffer: SharedBuffer) -> bool:
        return buffer.is_shared and buffer.mine.nbytes >= self._least_copied_bytes

    def _compresses(self, flat: torch.Tensor) -> bool:
        return self._wire_type is not None and flat.dtype == torch.float32

    def _start_on_host(self, flat: torch.Tensor) -> Work:
        wire = flat.to(self._wire_type)
        return _HostWork(self._group.allreduce([wire], self._sum_options), wire, flat)

    def _start_on_streams(self, flat: torch.Tensor) -> Work:
        if self._streams is None:
            self._streams = torch.cuda.Stream(flat.device), torch.cuda.Stream(flat.device)
        to_wire, from_wire = self._streams
        wire = torch.empty_like(flat, dtype=self._wire_type)
        to_wire.wait_stream(current_stream(flat.device))
        with torch.cuda.stream(to_wire):
            # NCCL would take 1/world in 16 bits.
            torch.mul(flat, 1.0 / self._group.size(), out=wire)
            work = self._group.allreduce([wire], self._sum_options)
        with torch.cuda.stream(from_wire):
            work.wait()
            flat.copy_(wire)
        return StreamWork(from_wire.record_event(), from_wire, [flat, wire])


class _HostWork:
    """The mean is cast back by whoever first waits."""

    def __init__(self, work: dist.Work, wire: torch.Tensor, flat: torch.Tensor) -> None:
        self._work, self._wire, self._flat = work, wire, flat
        self._is_cast = False

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()

    def wait(self, *timeout: timedelta) -> None:
        if not self._is_cast:
            self._work.wait(*timeout)
            self._flat.copy_(self._wire)
            self._is_cast = True
