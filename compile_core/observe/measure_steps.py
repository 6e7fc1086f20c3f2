"""Measures the steps of a run that is recorded: when each began, and what torch's profiler says of one of them.

A step begins where a compiled forward does, and lasts until the same one begins again.
"""

from __future__ import annotations

import atexit
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.observe.stage_times import total_seconds
from gradsplit.compile_core.run_record import is_recording, record
from gradsplit.compile_core.torch_facts.thread_state import profiler_is_on

# Programs are compiled and plans are settled in the first steps.
_PROFILED_STEP = 6
_KEPT_STEPS = 1000

# Called when a step begins, with its number; the steps are those of one graph after another.
listeners: list[Callable[[int], None]] = []

_watched: list[StepWatch] = []
_profiler: Any = None
_was_profiled = False


class StepWatch:
    """Hears when the regions of one graph's forward run."""

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.began_s: list[float] = []
        self._first = ""

    def region_started(self, name: str) -> None:
        self._first = self._first or name
        if name != self._first or len(self.began_s) >= _KEPT_STEPS:
            return
        _finish_profile(self)
        for listener in listeners:
            listener(len(self.began_s))
        self.began_s.append(time.perf_counter())
        if len(self.began_s) == _PROFILED_STEP:
            _start_profile(self)

    def region_finished(self, name: str) -> None:
        pass


def watch(graph: int) -> StepWatch | None:
    """What is to hear of a graph's forward; ``None`` where nothing is recorded."""
    if not is_recording():
        return None
    if not _watched:
        atexit.register(_record_end)
    _watched.append(StepWatch(graph))
    return _watched[-1]


def _start_profile(watched: StepWatch) -> None:
    global _profiler, _was_profiled
    if not _was_profiled and not profiler_is_on():
        _was_profiled = True
        profiler = torch.profiler.profile(acc_events=True)  # torch 2.11 warns without
        profiler.__enter__()
        _profiler = profiler, watched


def _finish_profile(watched: StepWatch | None) -> None:
    global _profiler
    if _profiler is None or watched not in (None, _profiler[1]):
        return
    (profiler, profiled), _profiler = _profiler, None
    profiler.__exit__(None, None, None)
    events = [
        {
            "name": event.key,
            "count": event.count,
            "cpu_us": event.self_cpu_time_total,
            "gpu_us": event.device_time_total,
        }
        for event in profiler.key_averages()
    ]
    record("profile", lambda: {"graph": profiled.graph, "events": events})


def _record_end() -> None:
    _finish_profile(None)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    for watched in _watched:
        record("steps", lambda watched=watched: {"graph": watched.graph, "began_s": watched.began_s})
    record(
        "end",
        lambda: {
            "seconds": total_seconds(),
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "peak_gpu_bytes": peak,
        },
    )
