"""Measures what a bucket plan is chosen from: when gradients become ready, and what an all-reduce takes; and what the
host takes, by which a plan is predicted.

In the rounds that are measured nothing is reduced before the backward has computed everything, so the times are those
of computing alone. The link is measured by all-reduces of several sizes. What ranks measured is reduced to the latest,
since a bucket waits for the last rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from bucketing.bucket import ALIGNMENT_BYTES
from bucketing.cost_model import CostModel
from bucketing.host_model import HostModel
from bucketing.link_model import LinkModel, fit_link_model
from distributed.clocks import clock_of
from distributed.collectives.averaging import Averaging
from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer

_REPETITIONS = 4
_IN_A_ROW = 4
_SMALLEST_BYTES = 4096
# Of a bucket, the part whose gradients come in 32 bits though most come in 16: those of norms and biases.
_WIDE_PART = 32
_ALIGNED_ELEMENTS = ALIGNMENT_BYTES // 4
# Of the time of 32 bits, that gradients in 16 bits may take at best.
_LEAST_SHARE = 0.25


@dataclass(frozen=True)
class _Times:
    """By gradient, and for the end of the backward, in seconds since it began."""

    of: Mapping[str, float]
    end_s: float


class ReadyTimes:
    """Notes when gradients become ready, and the host's share; one observer of ``GradientBuckets`` for a few rounds."""

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
        """Right behind ``all_computed``, so many all-reduces were started."""
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


def measure_link(
    averaging: Averaging, device: torch.device, largest_bytes: int, sent_dtype: torch.dtype | None = None
) -> LinkModel:
    """What averaging up to ``largest_bytes`` takes, each behind another as in a backward: neither what the host does to
    start one is part of it, nor how long ranks wait for one another at first. A collective, called on all ranks of the
    group.

    Args:
        sent_dtype: of gradients that come in 16 bits, if some do. Then a start-up is that of a bucket with both kinds.
    """
    clock = clock_of(device)
    numel = max(largest_bytes, 4 * _SMALLEST_BYTES) // 4
    narrow = None if sent_dtype is None else NarrowPart(numel, sent_dtype)
    buffer = averaging.allocate(numel, torch.float32, device, narrow)
    sizes = sorted({_SMALLEST_BYTES // 4, *(max(numel // part, 1) for part in (64, 16, 4, 1))})
    smallest = buffer.first(sizes[0])

    def measured_s(part: SharedBuffer, values: torch.Tensor | None = None) -> float:
        seconds = []
        for _ in range(_REPETITIONS):
            clock.let_host_get_ahead()
            averaging.start(smallest.mine, smallest).wait()
            start = clock.mark()
            for work in [averaging.start(part.mine, part, values) for _ in range(_IN_A_ROW)]:
                work.wait()
            seconds.append(clock.seconds(start, clock.mark()) / _IN_A_ROW)
        # The first of a size may set connections up.
        return max(statistics.median(seconds[1:]), 1e-9)

    link = fit_link_model([(size * 4, measured_s(buffer.first(size))) for size in sizes])
    # The smallest may be sent in another way than buckets are.
    sizes = sizes[1:]
    # All ranks do the same, whatever they have measured.
    if sent_dtype is None or len(sizes) < 2:
        return link
    values = torch.zeros(numel, dtype=sent_dtype, device=device)
    samples = []
    for size in sizes:
        count = (size - size // _WIDE_PART) // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS
        part = replace(buffer.first(size), narrow=NarrowPart(count, sent_dtype))
        wide_s = 4 * (size - count) * link.seconds_per_byte
        samples.append((4 * count, max(measured_s(part, values[:count]) - wide_s, 1e-9)))
    mixed = fit_link_model(samples)
    share = mixed.seconds_per_byte / link.seconds_per_byte if link.seconds_per_byte else 1.0
    startup_s = max(link.startup_s, mixed.startup_s)
    return LinkModel(startup_s, link.seconds_per_byte, min(max(share, _LEAST_SHARE), 1.0))


def agreed_costs(
    names: Sequence[str],
    times: ReadyTimes,
    averaging: Averaging,
    group: dist.ProcessGroup,
    device: torch.device,
    largest_bytes: int,
    sent_dtype: torch.dtype | None = None,
) -> CostModel:
    """The costs that hold for all ranks; a collective, called on all ranks of the group.

    Args:
        names: of the gradients, in the same order on all ranks.
        times: measured on this rank.
        largest_bytes: of the largest bucket there may be.
        sent_dtype: of gradients that come in 16 bits, if some do.
    """
    (ready, end_s), (queued, queued_end_s) = times.computed(names), times.queued(names)
    link = measure_link(averaging, device, largest_bytes, sent_dtype)
    others = [end_s, queued_end_s, times.start_s, link.startup_s, link.seconds_per_byte, link.narrow_share]
    values = torch.tensor([*ready, *queued, *others], dtype=torch.float64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([values], options).wait()
    latest, count = values.tolist(), len(names)
    ready_s = dict(zip(names, latest[:count], strict=True))
    queued_s = dict(zip(names, latest[count : 2 * count], strict=True))
    end_s, queued_end_s, start_s, startup_s, seconds_per_byte, narrow_share = latest[2 * count :]
    link = LinkModel(startup_s, seconds_per_byte, narrow_share)
    # On the CPU the host computes itself, and what starting takes it is part of the link's start-up.
    host = HostModel(queued_s, queued_end_s, start_s) if device.type != "cpu" else HostModel()
    return CostModel(ready_s, end_s, link, host=host)
