"""What calls cost the thread that makes them, where nothing else is worth counting: its processor time."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def median_seconds(calls: Sequence[Callable[[], Any]], rounds: int, round_s: float) -> list[float]:
    """Of a call, each: the median over rounds of about ``round_s``, in which the calls take turns, so that a busy
    machine disturbs all of them alike."""
    repeats = []
    for call in calls:
        time_call(call, 20)
        repeats.append(max(1, round(round_s / time_call(call, 20))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for found, call, times in zip(seconds, calls, repeats, strict=True):
            found.append(time_call(call, times))
    return [statistics.median(found) for found in seconds]


def time_call(call: Callable[[], Any], repeats: int) -> float:
    """Seconds a call."""
    start = time.thread_time()
    for _ in itertools.repeat(None, repeats):
        call()
    return (time.thread_time() - start) / repeats
