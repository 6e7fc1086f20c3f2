"""Seconds that each stage of each compilation took. Calls that find a compiled entry never come here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

# Stage -> one number a time it ran, in order. Stages appear as they first run, which is their order in the pipeline.
_seconds: dict[str, list[float]] = {}
_running: list[str] = []


@contextmanager
def timed(stage: str) -> Iterator[list[float]]:
    """Adds the time of the ``with`` block to a stage, also when it raises; then the list that it gives ends with it."""
    start = time.perf_counter()
    times = _seconds.setdefault(stage, [])
    _running.append(stage)
    try:
        yield times
    finally:
        _running.remove(stage)
        times.append(time.perf_counter() - start)


class Stopwatch:
    """What was recorded since it was made."""

    def __init__(self) -> None:
        self._before = {stage: len(times) for stage, times in _seconds.items()}

    def seconds(self) -> dict[str, list[float]]:
        since = {stage: times[self._before.get(stage, 0) :] for stage, times in _seconds.items()}
        return {stage: times for stage, times in since.items() if times}


def running_stages() -> tuple[str, ...]:
    """Those that run now, of all threads."""
    return tuple(_running)


def total_seconds() -> dict[str, float]:
    """Of each stage in this process."""
    return {stage: sum(times) for stage, times in _seconds.items()}


def compile_times(
    repr: Literal["str", "csv"] = "str", aggregate: bool = False
) -> str | tuple[list[str], list[str]]:
    """Seconds spent in each stage of all compilations of this process.

    Args:
        repr: "str" for a table to print, "csv" for a list of stages and a list of their times.
        aggregate: one sum a stage, instead of one number a time it ran.
    """
    if repr == "csv":
        return list(_seconds), [_shown(times, aggregate, 6) for times in _seconds.values()]
    if repr == "str":
        return print_times(_seconds, aggregate)
    raise ValueError(f"repr={repr!r} is not one of 'str', 'csv'")


def print_times(seconds: Mapping[str, Sequence[float]], aggregate: bool = False) -> str:
    """A table of stages and their seconds."""
    width = max(map(len, ["Stage", *seconds]))
    lines = ["gradsplit compile times:", f"{'Stage':{width}}  Runtimes (s)", f"{'-' * width}  ------------"]
    lines += [f"{stage:{width}}  {_shown(times, aggregate, 4)}" for stage, times in seconds.items()]
    return "\n".join(lines)


def _shown(times: Sequence[float], aggregate: bool, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in ([sum(times)] if aggregate else times))
