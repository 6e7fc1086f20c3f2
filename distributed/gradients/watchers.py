"""Who is told of rounds, and who knows of failures: what a ``Round`` asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class GradientObserver(Protocol):
    """Told what happens in a round, to measure it."""

    def gradients_arrived(self, names: Sequence[str]) -> None: ...

    def collective_starting(self, bucket: int) -> None: ...

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None: ...


class Watch(Protocol):
    """Knows of failures of the job."""

    def begins(self, what: str) -> None:
        """Is told of what all ranks do together."""
        ...

    def at_point(self) -> None:
        """Raises what has become known."""
        ...

    def wait(self, work: Any) -> None:
        """Waits for a collective that no stream waits for, and raises if another rank will not take part."""
        ...
