"""What a step's backward costs: when each gradient is ready, and what reducing it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradsplit.bucketing.link_model import LinkModel


@dataclass(frozen=True)
class HostModel:
    """When the host queues a backward without communication, in seconds since the device began it. By default nothing
    waits for it.

    Attributes:
        queued_s: by parameter, when all is queued that computes its gradient; before 0 where the host is far ahead.
        end_s: when the whole backward is.
        start_s: what it takes to start an all-reduce. All that is queued after it comes later by that.
    """

    queued_s: Mapping[str, float] = field(default_factory=dict)
    end_s: float = -math.inf
    start_s: float = 0.0

    def queued(self, names: Iterable[str], started: int) -> float:
        """When the gradients of these parameters are queued, if so many all-reduces have been started before."""
        return max(self.queued_s.get(name, -math.inf) for name in names) + started * self.start_s

    def ended(self, started: int) -> float:
        """When all is queued, these all-reduces included."""
        return self.end_s + started * self.start_s


@dataclass(frozen=True)
class CostModel:
    """Times of a backward without communication, in seconds since it began.

    Attributes:
        ready_s: by parameter, when its gradient is computed.
        end_s: when the backward has computed all it computes.
        link: what an all-reduce takes.
        contention: the share of its speed that computing loses while an all-reduce runs, from 0 to below 1: on a GPU
            a collective occupies some multiprocessors and some of the memory's bandwidth.
        host: when it has queued all this.

    Raises ValueError for times that are negative, or later than the end, and for other contentions.
    """

    ready_s: Mapping[str, float]
    end_s: float
    link: LinkModel
    contention: float = 0.0
    host: HostModel = field(default_factory=HostModel)

    def __post_init__(self) -> None:
        if not 0 <= self.contention < 1:
            raise ValueError(f"contention is a share from 0 to below 1, not {self.contention}")
        if not math.isfinite(self.end_s):
            raise ValueError(f"a backward cannot end at {self.end_s} s")
        for name, ready_s in self.ready_s.items():
            if not 0 <= ready_s <= self.end_s:
                raise ValueError(
                    f"the gradient of {name!r} is ready at {ready_s} s of a backward of {self.end_s} s"
                )
