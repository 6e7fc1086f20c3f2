"""What stages send one another beside what torch's schedules do, which is from neighbour to neighbour.

A message has a number as its tag, so that it does not matter in which order a rank reads what others have sent. It is
sent as soon as it is there, and waited for at the end of the step; who needs one waits until it arrives. Since it was
sent before what came through the neighbours, on which the reader also waits, nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Torch's schedules use tag 0.
_FIRST_TAG = 1
FORWARD, BACKWARD = range(2)


@dataclass(frozen=True)
class Message:
    """What a message is about: ``kind``, the position of its edge, the microbatch, and the stage that reads it."""

    kind: int
    edge: int
    microbatch: int
    stage: int


class Mail:
    """A rank's messages of one step.

    Args:
        group: of the pipeline's ranks.
        num_stages: of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_stages: int) -> None:
        self._group, self._num_stages = group, num_stages
        self._here: dict[Message, torch.Tensor] = {}
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, message: Message, flat: torch.Tensor, rank: int) -> None:
        """To a rank of the group, or to another stage of this one."""
        if rank == dist.get_rank(self._group):
            self._here[message] = flat
            return
        work = dist.isend(flat, group=self._group, group_dst=rank, tag=self._tag(message))
        self._sends.append((work, flat))

    def receive(self, message: Message, empty: Callable[[], torch.Tensor], rank: int) -> torch.Tensor:
        """A message that lies here, or that arrives in memory of ``empty``."""
        if rank == dist.get_rank(self._group):
            return self._here.pop(message)
        flat = empty()
        dist.recv(flat, group=self._group, group_src=rank, tag=self._tag(message))
        return flat

    def wait_for_sends(self) -> None:
        """Until all that was sent has arrived."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()
        self._here.clear()

    def _tag(self, message: Message) -> int:
        place = (message.microbatch * self._num_stages + message.stage) * 2 + message.kind
        return _FIRST_TAG + message.edge + (place << 12)
