"""Measures what a bucket plan is chosen from: when gradients become ready, and what an all-reduce takes; and what the
host takes, by which a plan is predicted.

In the rounds that are measured nothing is reduced before the backward has computed everything, so the times are those
of computing alone. The link is measured by all-reduces of several sizes. What ranks measured is reduced to the latest,
since a bucket waits for the last rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.bucketing.cost_model import CostModel, HostModel
from gradsplit.bucketing.link_model import LinkModel, fit_link_model
from gradsplit.distributed.clocks import clock_of
from gradsplit.distributed.collectives.averaging import Averaging
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer

_REPETITIONS = 4
_IN_A_ROW = 4
_SMALLEST_BYTES = 4096


@dataclass(frozen=True)
class _Times:
    """By gradient, and for the end of the backward, in seconds since it began."""

    of: Mapping[str, float]
    end_s: float


class ReadyTimes:
    """Notes when gradients become ready, and the host's share; for a few rounds."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        # Of each round, what the device has computed when, and what the host has queued.
        self._computed: list[_Times] = []
        self._queued: list[_Times] = []
        # What it took the host to start an all-reduce.
        self._starts_s: list[float] = []
        self._began: Any = None
        self._arrivals: list[tuple[Sequence[str], Any, float]] = []
        self._noted_s = 0.0

    def round_began(self) -> None:
        self._began, self._arrivals = self._clock.mark(), []

    def gradients_arrived(self, names: Sequence[str]) -> None:
        self._arrivals.append((names, self._clock.mark(), perf_counter()))

    def all_computed(self) -> None:
        end, queued_s = self._clock.mark(), perf_counter()
        end_s = self._clock.seconds(self._began, end)
        # The device comes to the end now, which says when it began by the host's clock.
        began_s = perf_counter() - end_s
        ready: dict[str, float] = {}
        queued: dict[str, float] = {}
        # What comes several times is ready at the last.
        for names, mark, at_s in self._arrivals:
            ready_s = self._clock.seconds(self._began, mark)
            ready |= dict.fromkeys(names, ready_s)
            queued |= dict.fromkeys(names, min(at_s - began_s, ready_s))
        self._computed.append(_Times(ready, end_s))
        self._queued.append(_Times(queued, min(queued_s - began_s, end_s)))
        self._noted_s = perf_counter()

    def all_started(self, count: int) -> None:
        """Right after ``all_computed``, so many all-reduces were started."""
        self._starts_s.append((perf_counter() - self._noted_s) / count)

    def computed(self, names: Sequence[str]) -> tuple[list[float], float]:
        """Medians over the rounds, when each gradient was ready and when the backward ended, in seconds since its
        begin. A gradient that did not come counts as ready at the end."""
        return _medians(self._computed, names)

    def queued(self, names: Sequence[str]) -> tuple[list[float], float]:
        """The same of what the host had queued."""
        return _medians(self._queued, names)

    @property
    def start_s(self) -> float:
        """What it took the host to start an all-reduce, as the median of the rounds."""
        return statistics.median(self._starts_s)


def _medians(rounds: Sequence[_Times], names: Sequence[str]) -> tuple[list[float], float]:
    end_s = statistics.median(times.end_s for times in rounds)
    found = (statistics.median(times.of.get(name, times.end_s) for times in rounds) for name in names)
    return [min(seconds, end_s) for seconds in found], end_s


def measure_link(averaging: Averaging, device: torch.device, largest_bytes: int) -> LinkModel:
    """What averaging up to ``largest_bytes`` takes, each after another as in a backward: neither what the host does to
    start one is part of it, nor how long ranks wait for one another at first. A collective, called on all ranks of the
    group."""
    clock = clock_of(device)
    numel = max(largest_bytes, 4 * _SMALLEST_BYTES) // 4
    buffer = averaging.allocate(numel, torch.float32, device)
    sizes = sorted({_SMALLEST_BYTES // 4, *(max(numel // part, 1) for part in (64, 16, 4, 1))})
    smallest = buffer.first(sizes[0])

    def measured_s(part: SharedBuffer) -> float:
        seconds = []
        for _ in range(_REPETITIONS):
            clock.let_host_get_ahead()
            averaging.start(smallest.mine, smallest).wait()
            start = clock.mark()
            for work in [averaging.start(part.mine, part) for _ in range(_IN_A_ROW)]:
                work.wait()
            seconds.append(clock.seconds(start, clock.mark()) / _IN_A_ROW)
        # The first of a size may set connections up.
        return max(statistics.median(seconds[1:]), 1e-9)

    return fit_link_model([(size * 4, measured_s(buffer.first(size))) for size in sizes])


def agreed_costs(
    names: Sequence[str],
    times: ReadyTimes,
    averaging: Averaging,
    group: dist.ProcessGroup,
    device: torch.device,
    largest_bytes: int,
) -> CostModel:
    """The costs that hold for all ranks; a collective, called on all ranks of the group.

    Args:
        names: of the gradients, in the same order on all ranks.
        times: measured on this rank.
        largest_bytes: of the largest bucket there may be.
    """
    (ready, end_s), (queued, queued_end_s) = times.computed(names), times.queued(names)
    link = measure_link(averaging, device, largest_bytes)
    others = [end_s, queued_end_s, times.start_s, link.startup_s, link.seconds_per_byte]
    values = torch.tensor([*ready, *queued, *others], dtype=torch.float64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([values], options).wait()
    latest, count = values.tolist(), len(names)
    ready_s = dict(zip(names, latest[:count], strict=True))
    queued_s = dict(zip(names, latest[count : 2 * count], strict=True))
    end_s, queued_end_s, start_s, startup_s, seconds_per_byte = latest[2 * count :]
    link = LinkModel(startup_s, seconds_per_byte)
    # On the CPU the host computes itself, and what starting takes it is part of the link's start-up.
    host = HostModel(queued_s, queued_end_s, start_s) if device.type != "cpu" else HostModel()
    return CostModel(ready_s, end_s, link, host=host)
