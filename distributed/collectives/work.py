"""A collective under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch


class Work(Protocol):
    """A ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta = ..., /) -> Any:
        """On a GPU the current stream waits, else the caller."""
        ...

    def is_completed(self) -> bool: ...


class StreamWork:
    """Is done where a stream has come to an event.

    Args:
        done: the event, of CUDA.
        kept: memory that other streams than the one it is of use until then; a tensor of the device.
    """

    def __init__(self, done: Any, kept: torch.Tensor) -> None:
        self._done, self._kept = done, kept

    def is_completed(self) -> bool:
        return self._done.query()

    def wait(self, *timeout: timedelta) -> None:
        # Of the bucket's device, which need not be the caller's current one.
        self._done.wait(torch.cuda.current_stream(self._kept.device))
