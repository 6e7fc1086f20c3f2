"""What the host does beside a backward: it queues work ahead of the device, and starts all-reduces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


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
