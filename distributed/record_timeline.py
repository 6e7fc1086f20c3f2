"""Measures when the segments of a backward computed and when its all-reduces ran."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from bucketing.timeline import Interval, Timeline
from compile_core.errors import CompileError
from distributed.compile_ddp import inspect_ddp


class HostRecorder:
    """For CPU tensors: the host's clock. A thread waits for each all-reduce and notes when it ended.

    A callback on the work would be simpler, but the process group's thread would then own Python objects, and a process
    that ends while that thread lets go of them is aborted.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._works: SimpleQueue[tuple[int, int, float, Any] | None] = SimpleQueue()
        self._waiter = Thread(target=self._wait_for_works, name="gradsplit-recorder", daemon=True)
        self._waiter.start()
        self._started_s = 0.0
        self._starting_s = 0.0

    def region_started(self, name: str) -> None:
        self._started_s = time.perf_counter()

    def region_finished(self, name: str) -> None:
        self._intervals.append(Interval("compute", name, self._started_s, time.perf_counter()))

    def collective_starting(self, bucket: int) -> None:
        self._starting_s = time.perf_counter()

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        self._works.put((bucket, size_bytes, self._starting_s, work))

    def gradients_arrived(self, names: Sequence[str]) -> None:
        """Regions tell as much."""

    def round_ended(self) -> None:
        """The works tell as much."""

    def finish(self) -> None:
        """Waits until every all-reduce has ended."""
        self._works.put(None)
        self._waiter.join()

    def timeline(self) -> Timeline:
        return Timeline(tuple(self._intervals))

    def _wait_for_works(self) -> None:
        for bucket, size_bytes, started_s, work in iter(self._works.get, None):
            work.get_future().wait()
            ended_s = time.perf_counter()
            self._intervals.append(Interval("all_reduce", f"bucket {bucket}", started_s, ended_s, size_bytes))


class DeviceRecorder:
    """For CUDA tensors: events on the compute stream, and on a stream of its own that waits for each all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._started: torch.cuda.Event | None = None
        self._starting: torch.cuda.Event | None = None
        self._pairs: list[tuple[Any, str, torch.cuda.Event, torch.cuda.Event, int]] = []

    def region_started(self, name: str) -> None:
        self._started = self._mark(torch.cuda.current_stream(self._device))

    def region_finished(self, name: str) -> None:
        assert self._started is not None
        self._pairs.append(
            ("compute", name, self._started, self._mark(torch.cuda.current_stream(self._device)), 0)
        )

    def collective_starting(self, bucket: int) -> None:
        self._starting = self._mark(torch.cuda.current_stream(self._device))

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        assert self._starting is not None
        started = self._starting
        with torch.cuda.stream(self._stream):
            work.wait()
            ended = self._mark(self._stream)
        self._pairs.append(("all_reduce", f"bucket {bucket}", started, ended, size_bytes))

    def gradients_arrived(self, names: Sequence[str]) -> None:
        """Regions tell as much."""

    def round_ended(self) -> None:
        """The works tell as much."""

    def finish(self) -> None:
        """Waits until every all-reduce has ended."""
        torch.cuda.synchronize(self._device)

    def timeline(self) -> Timeline:
        # Buckets are reduced one after the other: one cannot have begun before the one before it ended.
        intervals, free_s = [], 0.0
        for kind, label, started, ended, size_bytes in self._pairs:
            start_s = self._origin.elapsed_time(started) / 1e3
            end_s = self._origin.elapsed_time(ended) / 1e3
            if kind == "all_reduce":
                start_s = min(max(start_s, free_s), end_s)
                free_s = end_s
            intervals.append(Interval(kind, label, start_s, end_s, size_bytes))
        return Timeline(tuple(intervals))

    def _mark(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


@contextmanager
def record_timeline(compiled: Any) -> Iterator[HostRecorder | DeviceRecorder]:
    """Records the backwards that run inside the context; afterwards the recorder's ``timeline()`` has them.

    Args:
        compiled: what ``compile_core.compile`` made of a DDP module, called at least once before.

    Raises:
        TypeError: not a compiled DDP module.
        CompileError: the module reduces its gradients with stock DDP's reducer, which is not recorded.
    """
    runner = inspect_ddp(compiled)
    buckets = runner.buckets
    if buckets is None:
        raise CompileError(
            f"nothing to record: {runner.reason_for_reducer or 'the module was not called yet'}"
        )
    device = next(iter(buckets.parameters.values())).device
    recorder = DeviceRecorder(device) if device.type == "cuda" else HostRecorder()
    backwards = [graph.backward for graph in runner.graphs if graph.backward is not None]
    buckets.observer = recorder
    for backward in backwards:
        backward.observer = recorder
    try:
        yield recorder
    finally:
        recorder.finish()
        buckets.observer = None
        for backward in backwards:
            backward.observer = None
