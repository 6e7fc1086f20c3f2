"""What happened when: compute segments and all-reduces of one step, and how much of the latter was hidden.

All sums are over unions of intervals, so all-reduces that run at the same time are counted once.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Span = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A compute segment or an all-reduce, in seconds of any clock that all intervals of a timeline share.

    ``bytes`` is what an all-reduce moved, 0 for compute. Raises ValueError when it ends before it starts.
    """

    kind: Literal["compute", "all_reduce"]
    label: str
    start_s: float
    end_s: float
    bytes: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s)) or self.end_s < self.start_s:
            raise ValueError(f"interval {self.label!r} starts at {self.start_s} s and ends at {self.end_s} s")


@dataclass(frozen=True)
class Timeline:
    """The intervals of one rank's step, in any order."""

    intervals: tuple[Interval, ...]

    @property
    def start_s(self) -> float:
        """When the first interval starts; 0 without intervals."""
        return min((interval.start_s for interval in self.intervals), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last interval ends; 0 without intervals."""
        return max((interval.end_s for interval in self.intervals), default=0.0)

    @property
    def compute_ms(self) -> float:
        return 1e3 * total_s(self.busy("compute"))

    @property
    def all_reduce_ms(self) -> float:
        return 1e3 * total_s(self.busy("all_reduce"))

    @property
    def overlap_ms(self) -> float:
        """How long an all-reduce and a compute segment ran at the same time."""
        return 1e3 * total_s(intersect(self.busy("all_reduce"), self.busy("compute")))

    @property
    def exposed_ms(self) -> float:
        """How long an all-reduce ran while nothing was computed."""
        return self.all_reduce_ms - self.overlap_ms

    def busy(self, kind: Literal["compute", "all_reduce"]) -> list[Span]:
        """When something of this kind ran: disjoint (start_s, end_s), ascending."""
        return unite(
            (interval.start_s, interval.end_s) for interval in self.intervals if interval.kind == kind
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format that Perfetto and chrome://tracing open.

        One complete event (`X`, times in µs since the first start) an interval; compute is thread 1 and
        all-reduce thread 2 of process 0.
        """
        names = {"compute": (1, "compute"), "all_reduce": (2, "all-reduce")}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": name}}
            for thread, name in names.values()
        ]
        for interval in sorted(self.intervals, key=lambda interval: interval.start_s):
            events.append(
                {
                    "ph": "X",
                    "name": interval.label,
                    "cat": interval.kind,
                    "pid": 0,
                    "tid": names[interval.kind][0],
                    "ts": 1e6 * (interval.start_s - self.start_s),
                    "dur": 1e6 * (interval.end_s - interval.start_s),
                    "args": {"bytes": interval.bytes} if interval.kind == "all_reduce" else {},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write ``chrome_trace()`` as JSON to ``path``, whose folder must exist."""
        Path(path).write_text(json.dumps(self.chrome_trace(), indent=1) + "\n", encoding="utf-8")


def unite(spans: Iterable[Span]) -> list[Span]:
    """The union of spans as disjoint, ascending ones; touching ones are joined."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def intersect(left: list[Span], right: list[Span]) -> list[Span]:
    """Where two lists of disjoint, ascending spans overlap."""
    common: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        # The one that ends first cannot meet anything later.
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def total_s(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
