"""Measures when the segments of a backward computed, when gradients arrived, and when all-reduces ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import torch

from gradsplit.bucketing.timeline import Interval, Timeline
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.communicator import RegionObserver
from gradsplit.compile_core.runtime.executable import Executable
from gradsplit.distributed.clocks import Clock, DeviceClock, HostClock
from gradsplit.distributed.compile_ddp import CompiledDDP, inspect_ddp


class TimelineRecorder:
    """Notes what a device computes and reduces, by marks of its clock; seconds are counted from its first mark."""

    _one_at_a_time: bool  # an all-reduce begins when the one before it has ended

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._origin = self._started = self._starting = clock.mark()
        self._spans: list[tuple[Literal["compute", "all_reduce"], str, Any, Any, int]] = []
        self._arrived: dict[str, Any] = {}

    def region_started(self, name: str) -> None:
        self._started = self._clock.mark()

    def region_finished(self, name: str) -> None:
        self._spans.append(("compute", name, self._started, self._clock.mark(), 0))

    def collective_starting(self, bucket: int) -> None:
        self._starting = self._clock.mark()

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        raise NotImplementedError

    def gradients_arrived(self, names: Sequence[str]) -> None:
        self._arrived.update(dict.fromkeys(names, self._clock.mark()))

    def finish(self) -> None:
        """Waits until every all-reduce has ended."""
        raise NotImplementedError

    def timeline(self) -> Timeline:
        intervals, free_s = [], 0.0
        for kind, label, started, ended, size_bytes in self._spans:
            start_s, end_s = self._seconds(started), self._seconds(ended)
            if kind == "all_reduce" and self._one_at_a_time:
                start_s = min(max(start_s, free_s), end_s)
                free_s = end_s
            intervals.append(Interval(kind, label, start_s, end_s, size_bytes))
        return Timeline(tuple(intervals))

    def arrived_s(self) -> dict[str, float]:
        """By parameter, when its gradient was complete, by the timeline's clock; of several backwards, in the last."""
        return {name: self._seconds(mark) for name, mark in self._arrived.items()}

    def _seconds(self, mark: Any) -> float:
        return self._clock.seconds(self._origin, mark)


class HostRecorder(TimelineRecorder):
    """For CPU tensors. A thread waits for each all-reduce and notes when it ended.

    A callback on the work would be simpler, but the process group's thread would then own Python objects, and a process
    that ends while that thread lets go of them is aborted.
    """

    _one_at_a_time = False

    def __init__(self) -> None:
        super().__init__(HostClock())
        self._works: SimpleQueue[tuple[int, int, float, Any] | None] = SimpleQueue()
        self._waiter = Thread(target=self._wait_for_works, name="gradsplit-recorder", daemon=True)
        self._waiter.start()

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        self._works.put((bucket, size_bytes, self._starting, work))

    def finish(self) -> None:
        self._works.put(None)
        self._waiter.join()

    def _wait_for_works(self) -> None:
        for bucket, size_bytes, starting, work in iter(self._works.get, None):
            work.get_future().wait()
            self._spans.append(("all_reduce", f"bucket {bucket}", starting, self._clock.mark(), size_bytes))


class DeviceRecorder(TimelineRecorder):
    """For CUDA tensors: marks on the compute stream, and on a stream of its own that waits for each all-reduce."""

    _one_at_a_time = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(DeviceClock(device))
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        with torch.cuda.stream(self._stream):
            work.wait()
            ended = self._clock.mark()
        self._spans.append(("all_reduce", f"bucket {bucket}", self._starting, ended, size_bytes))

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


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
def record_timeline(compiled: Any) -> Iterator[TimelineRecorder]:
    """Records the backwards that run inside the context; afterwards the recorder's ``timeline()`` has them.

    Args:
        compiled: what ``gradsplit.compile`` made of a DDP module, called at least once before.

    Raises:
        TypeError: not a compiled DDP module.
        CompileError: the module reduces its gradients with stock DDP's reducer, which is not recorded; or it is being
            recorded already.
    """
    runner = inspect_ddp(compiled)
    buckets = runner.buckets
    if buckets is None:
        raise CompileError(
            f"nothing to record: {runner.reason_for_reducer or 'the module was not called yet'}"
        )
    if buckets.observer is not None:
        raise CompileError("the module is being recorded already: leave that context first")
    on_gpu = buckets.device.type == "cuda"
    recorder: TimelineRecorder = DeviceRecorder(buckets.device) if on_gpu else HostRecorder()
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
