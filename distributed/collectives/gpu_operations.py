"""A rank's operations on a stream of its GPU, of which the driver queues those of a mean in one call."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradsplit.compile_core.torch_facts.cuda import current_device
from gradsplit.distributed.collectives.driver_queue import DriverQueue
from gradsplit.distributed.collectives.mean_kernel import MeanKernel
from gradsplit.distributed.collectives.stream_meeting import StreamMeeting


class GpuOperations:
    """``RankOperations`` that are noted, until ``queue`` is called.

    Args:
        device: this rank's GPU.

    Raises what ``load_queue`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue = DriverQueue()
        self._meeting: StreamMeeting | None = None
        self.copy = self._queue.copy
        self.add_and_divide = MeanKernel(device, self._queue.launch)

    def build(self, dtype: torch.dtype) -> None:
        """The kernel for buffers of a dtype, before its first use. Raises CompileError where Triton fails."""
        self.add_and_divide.build(dtype)

    def queue(self, stream: torch.cuda.Stream) -> None:
        """What was noted is queued on a stream of this GPU. Raises RuntimeError where the driver cannot."""
        if current_device() == self._device.index:
            self._queue.queue(stream.cuda_stream)
        else:
            with torch.cuda.device(self._device):
                self._queue.queue(stream.cuda_stream)

    def join(self, group: dist.ProcessGroup) -> None:
        """From here on it meets the ranks of this group, of which a rehearsal is noted; a collective."""
        self._meeting = StreamMeeting(group, self._device, self._queue)
        self._meeting.rehearse()

    def meet(self) -> None:
        assert self._meeting is not None
        self._meeting()

    def release_waits(self) -> None:
        """See ``StreamMeeting``; for another thread."""
        if self._meeting is not None:
            self._meeting.release_waits()
