"""What a compiled program needs of whatever reduces its gradients across processes."""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """Owns the buffers that destinations name, and the collectives over them.

    A program that holds collectives calls ``begin`` first and ``finish`` last, and in between starts and awaits each
    bucket exactly once, in an order that is the same on every process.
    """

    def destination(self, name: str) -> torch.Tensor:
        """The persistent tensor into which the program stores the result of this destination name."""
        ...

    def begin(self) -> None:
        """Called before the first region runs."""
        ...

    def start(self, bucket: int) -> None:
        """Starts reducing a bucket whose destinations are all written; returns at once."""
        ...

    def wait(self, bucket: int) -> None:
        """Makes the work that follows see the reduced bucket."""
        ...

    def finish(self) -> None:
        """Called after the last step."""
        ...


class RegionObserver(Protocol):
    """Told when regions run, to draw a measured step."""

    def region_started(self, name: str) -> None: ...

    def region_finished(self, name: str) -> None: ...
