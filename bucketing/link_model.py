"""What an all-reduce costs: a start-up and a time for each byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkModel:
    """An all-reduce of n bytes takes ``startup_s + n * seconds_per_byte``.

    Raises ValueError for negative or infinite costs.
    """

    startup_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for cost in (self.startup_s, self.seconds_per_byte):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(
                    f"an all-reduce cannot cost {self.startup_s} s and {self.seconds_per_byte} s/byte"
                )

    def seconds(self, size_bytes: int) -> float:
        return self.startup_s + size_bytes * self.seconds_per_byte

    def at_speed(self, share: float) -> LinkModel:
        """The same link when it sends with this share of its speed."""
        return LinkModel(self.startup_s, self.seconds_per_byte / share)

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
