"""A collective under way."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from gradsplit.distributed.streams import current_stream


class Work(Protocol):
    """A ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta = ..., /) -> Any:
        """On a GPU the current stream waits, else the caller."""
        ...

    def is_completed(self) -> bool: ...


class StreamWork:
    """Is done where a stream has come to an event.

    What it keeps returns to torch's allocator after the event. As a rule the stream for which it was allocated waits,
    and the allocator need not be told, which would ask the event at every allocation until it is over.

    Args:
        done: the event, of CUDA.
        stream: which comes there.
        kept: memory that it uses until then, allocated for the stream that is current now.
    """

    def __init__(self, done: Any, stream: torch.cuda.Stream, kept: Sequence[torch.Tensor]) -> None:
        self._done, self._stream, self._kept = done, stream, kept
        self._owner = current_stream(stream.device)
        self._owner_waits = False

    def is_completed(self) -> bool:
        return self._done.query()

    def wait(self, *timeout: timedelta) -> None:
        # Of the bucket's device, which need not be the caller's current one.
        here = current_stream(self._stream.device)
        self._done.wait(here)
        self._owner_waits |= here is self._owner

    def __del__(self) -> None:
        # A backward that broke off waits for nothing.
        if not self._owner_waits:
            for memory in self._kept:
                memory.record_stream(self._stream)
