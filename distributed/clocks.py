"""Moments of a device's work, by CUDA events or by the host's clock."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from gradsplit.compile_core.torch_facts.cuda import sleep
from gradsplit.distributed.streams import current_stream

# About two milliseconds.
_HEAD_START_CYCLES = 4_000_000


class Clock(Protocol):
    """Marks moments of a device's work."""

    def mark(self) -> Any: ...

    def let_host_get_ahead(self) -> None:
        """What is queued next begins in a while, so that it does not wait for the host."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; may wait for them."""
        ...


class HostClock:
    """For CPU tensors, whose work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def let_host_get_ahead(self) -> None:
        """It does the work itself."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """Events on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self._device))
        return event

    def let_host_get_ahead(self) -> None:
        with torch.cuda.device(self._device):
            sleep(_HEAD_START_CYCLES)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # They may lie on different streams.
        start.synchronize()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
