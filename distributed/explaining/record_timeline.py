"""Measures when the segments of a backward computed, when gradients arrived, and when all-reduces ran."""

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
from compile_core.ir.communicator import RegionObserver
from compile_core.runtime.executable import Executable
from distributed.compile_ddp import CompiledDDP, inspect_ddp


class HostRecorder:
    """For CPU tensors: the host's clock. A thread waits for each all-reduce and notes when it ended.

    A callback on the work would be simpler, but the process group's thread would then own Python objects, and a process
    that ends while that thread lets go of them is aborted.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._arrived_s: dict[str, float] = {}
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
        self._arrived_s.update(dict.fromkeys(names, time.perf_counter()))

    def finish(self) -> None:
        """Waits until every all-reduce has ended."""
        self._works.put(None)
        self._waiter.join()

    def timeline(self) -> Timeline:
        return Timeline(tuple(self._intervals))

    def arrived_s(self) -> dict[str, float]:
        """By parameter, when its gradient was complete, by the timeline's clock; of several backwards, in the last."""
        return self._arrived_s

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
        self._arrived: dict[str, torch.cuda.Event] = {}

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
        self._arrived.update(dict.fromkeys(names, self._mark(torch.cuda.current_stream(self._device))))

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

    def arrived_s(self) -> dict[str, float]:
        """As ``HostRecorder.arrived_s``."""
        return {name: self._origin.elapsed_time(event) / 1e3 for name, event in self._arrived.items()}

    def _mark(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class _Labelled:
    """Passes on the regions of one of several graphs, whose names are the same."""

    def __init__(self, recorder: RegionObserver, label: str) -> None:
        self._recorder = recorder
        self._label = label

    def region_started(self, name: str) -> None:
        self._recorder.region_started(self._label + name)

    def region_finished(self, name: str) -> None:
        self._recorder.region_finished(self._label + name)


def labelled_backwards(runner: CompiledDDP) -> dict[str, Executable]:
    """The backwards of a module's graphs, by what stands before the names of their regions in a timeline."""
    backwards = [graph.backward for graph in runner.graphs if graph.backward is not None]
    labels = [f"graph {k} " if len(backwards) > 1 else "" for k in range(len(backwards))]
    return dict(zip(labels, backwards, strict=True))


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
    backwards = labelled_backwards(runner)
    buckets.observer = recorder
    for label, backward in backwards.items():
        backward.observer = _Labelled(recorder, label)
    try:
        yield recorder
    finally:
        recorder.finish()
        buckets.observer = None
        for backward in backwards.values():
            backward.observer = None
