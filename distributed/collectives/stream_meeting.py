"""Streams of several GPUs wait for one another by words of memory, without a kernel.

The driver queues on a stream that a word is written, or waited for. Each rank has a word for every other in memory that
they reach: to meet, it writes the number of the meeting to its word on each of the others, and waits for theirs. NCCL
would take the host twenty times as long for an all-reduce of one number, and a multiprocessor.

No watchdog looks at such a wait: whoever knows that a rank will not come calls ``release_waits``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradsplit.distributed.collectives.driver_queue import DriverQueue
from gradsplit.distributed.collectives.shared_buffers import share

_CLOCK = 2**32


class StreamMeeting:
    """Meetings of one stream of each rank; of another only when all ranks have left the one before.

    Args:
        group: over which ranks; to make one is a collective.
        device: this rank's GPU.
        queue: where they are noted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, queue: DriverQueue) -> None:
        self._queue = queue
        # One for every rank.
        self._words = words = share(group.size(), torch.int32, group, device)
        rank, itemsize = words.rank, words.mine.itemsize
        others = [other for other in range(group.size()) if other != rank]
        self._on_others = [words.of_ranks[other].data_ptr() + rank * itemsize for other in others]
        self._from_others = [words.mine.data_ptr() + other * itemsize for other in others]
        self._met = 0
        # Of another priority: streams of one may share a queue of the GPU.
        self._free_stream = torch.cuda.Stream(device, priority=-1)

    def rehearse(self) -> None:
        """Writes and waits as it would for others, alone."""
        own = self._words.mine[self._words.rank :].data_ptr()
        self._queue.write(own, 1)
        self._queue.wait(own, 1)

    def __call__(self) -> None:
        """What is queued on the stream next begins when all ranks' streams have come here. A collective."""
        self._met = (self._met + 1) % _CLOCK
        for word in self._on_others:
            self._queue.write(word, self._met)
        for word in self._from_others:
            self._queue.wait(word, self._met)

    def release_waits(self) -> None:
        """Nobody is waited for any longer; for another thread than the one that is blocked. No meeting holds from then
        on."""
        far = (self._met + _CLOCK // 4) % _CLOCK
        with torch.cuda.stream(self._free_stream):
            self._words.mine.fill_(far - _CLOCK if far >= _CLOCK // 2 else far)
