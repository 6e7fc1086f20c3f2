"""What an all-reduce costs: a start-up and a time for each byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LinkModel:
    """An all-reduce of n bytes takes ``startup_s + n * seconds_per_byte``; of gradients sent in 16 bits each byte
    counts ``narrow_share``, which is more than the half where it takes time to cast them.

    Raises ValueError for negative or infinite costs and for a share that is not between 0 and 1.
    """

    startup_s: float
    seconds_per_byte: float
    narrow_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.narrow_share <= 1:
            raise ValueError(f"gradients in 16 bits cannot take {self.narrow_share} of the time of others")
        for cost in (self.startup_s, self.seconds_per_byte):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(
                    f"an all-reduce cannot cost {self.startup_s} s and {self.seconds_per_byte} s/byte"
                )

    def seconds(self, size_bytes: float) -> float:
        return self.startup_s + size_bytes * self.seconds_per_byte

    def counted_bytes(self, size_bytes: int, sent_dtype: str | None) -> float:
        """What these bytes of gradients count; see ``Parameter``."""
        return size_bytes if sent_dtype is None else size_bytes * self.narrow_share

    def at_speed(self, share: float) -> LinkModel:
        """The same link when it sends with this share of its speed."""
        return replace(self, seconds_per_byte=self.seconds_per_byte / share)

    @staticmethod
    def ring(ranks: int, hop_s: float, seconds_per_byte: float) -> LinkModel:
        """Ring all-reduce among ``ranks``: each of its 2(ranks - 1) steps passes 1/ranks of the data to a neighbour,
        which costs ``hop_s`` and ``seconds_per_byte``."""
        if ranks < 1:
            raise ValueError(f"{ranks} ranks cannot reduce anything")
        steps = 2 * (ranks - 1)
        return LinkModel(steps * hop_s, steps / ranks * seconds_per_byte)


def fit_link_model(samples: Sequence[tuple[int, float]]) -> LinkModel:
    """The model nearest to measured (bytes, seconds), by the squares of the *relative* errors: small all-reduces show
    the start-up, large ones the time a byte, and both must count. Neither cost is negative.

    Raises ValueError for fewer than two different sizes and for times that are not positive.
    """
    if len({size_bytes for size_bytes, _ in samples}) < 2:
        raise ValueError("a link model needs all-reduces of at least two sizes")
    if any(seconds <= 0 for _, seconds in samples):
        raise ValueError("an all-reduce takes a positive time")
    # Least squares of (a + b * size - time) / time.
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    size = sum(w * n for w, (n, _) in zip(weights, samples, strict=True)) / total
    time = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (n - size) ** 2 for w, (n, _) in zip(weights, samples, strict=True))
    together = sum(w * (n - size) * (t - time) for w, (n, t) in zip(weights, samples, strict=True))
    per_byte = max(together / spread, 0.0)
    startup = time - per_byte * size
    if startup < 0:
        # Through the origin.
        squares = sum(w * n * n for w, (n, _) in zip(weights, samples, strict=True))
        per_byte = sum(w * n * t for w, (n, t) in zip(weights, samples, strict=True)) / squares
        startup = 0.0
    return LinkModel(startup, per_byte)
