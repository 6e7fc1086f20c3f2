"""Messages as NCCL may bring them: one after the other, what is sent being read as late as the sender's program allows.

Over NCCL a message is work on a stream of its own. A sender's program goes on meanwhile, and knows that the message was
read where it has waited for that one or for a later one. Whoever was given a tensor to send does not count among its
holders: torch's allocator is told of the other stream instead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from gradsplit.compile_core.runtime import recording
from gradsplit.compile_core.runtime.recording import storage_of


class LateMessages:
    """Stands where ``torch.distributed.batch_isend_irecv`` does, in a rank of a group of gloo."""

    def __init__(self) -> None:
        self._waiting: deque[_Batch] = deque()
        self._on_their_way: list[Any] = []
        # How often each storage is to be sent.
        self._held: Counter[int] = Counter()

    def take_place(self, patch: pytest.MonkeyPatch) -> None:
        counted = recording.storage_use_count
        patch.setattr(dist, "batch_isend_irecv", self.start)
        patch.setattr(
            recording, "storage_use_count", lambda storage: counted(storage) - self._held.get(storage, 0)
        )

    def start(self, operations: Sequence[dist.P2POp]) -> list[_Batch]:
        batch = _Batch(self, operations)
        self._waiting.append(batch)
        self._held.update(batch.sent)
        return [batch]

    def finish(self, last: _Batch) -> None:
        """Brings what was started until then."""
        while last in self._waiting:
            batch = self._waiting.popleft()
            self._held.subtract(batch.sent)
            received = []
            for operation in batch.operations:
                peer: dict[str, Any] = {"group": operation.group, "tag": operation.tag}
                if operation.op is dist.irecv:
                    received.append(dist.irecv(operation.tensor, group_src=operation.group_peer, **peer))
                else:
                    work = dist.isend(operation.tensor.clone(), group_dst=operation.group_peer, **peer)
                    self._on_their_way.append(work)
            for work in received:
                work.wait()
        self._on_their_way = [work for work in self._on_their_way if not work.is_completed()]


class _Batch:
    def __init__(self, messages: LateMessages, operations: Sequence[dist.P2POp]) -> None:
        self.operations = [*operations]
        self.sent = [storage_of(one.tensor) for one in operations if one.op is dist.isend]
        self._messages = messages

    def wait(self) -> None:
        self._messages.finish(self)
