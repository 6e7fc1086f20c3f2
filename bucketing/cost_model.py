"""What a step's backward costs: when each gradient is ready, and what reducing it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradsplit.bucketing.host_model import HostModel
from gradsplit.bucketing.link_model import LinkModel


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
