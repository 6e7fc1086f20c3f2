"""What a compiled program needs of whatever reduces its gradients across processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch


class Communicator(Protocol):
    """Owns the places that destinations name, and the collectives over them.

    When a program that has destinations runs, it asks for each of them and tells which have been written. What is
    started when is not the program's concern: gradients of one collective may come from several programs.
    """

    def anchor(self, names: Sequence[str]) -> torch.Tensor:
        """A tensor that requires a gradient and never gets one. It stands for the inputs of a program whose gradients
        are taken, those of these destinations: the engine reaches it exactly where it is to accumulate them."""
        ...

    def expect(self, node: Any, names: Sequence[str]) -> None:
        """Called in a forward: when the engine runs ``node`` of autograd's graph, these destinations are written."""
        ...

    def wanted_values(self, names: Sequence[str]) -> frozenset[str]:
        """Called first in a backward: those of these destinations whose gradients are asked for as values. If there are
        any, nothing is stored, and ``take_values`` is called behind it."""
        ...

    def take_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """The values that were wanted of a program, but those that are undefined."""
        ...

    def leave_out(self, node: Any, results_of: Mapping[str, Collection[int]]) -> None:
        """Called in a backward, before ``begin``: what the program of ``node`` stores there is undefined, as to none of
        these results of the node, which it depends on, a gradient came."""
        ...

    def begin(self) -> None:
        """Called in a backward, before the first region of a program runs."""
        ...

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        """What ``destinations`` will give for these in the backward that has begun, where these are the tensors that
        a backward stores to as a rule: only another plan moves them. ``None`` in an exceptional backward, whose results
        are not stored or come on top of others."""
        ...

    def destinations(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """The tensors into which the program stores the results of these destination names."""
        ...

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        """Called behind each region: these destinations, which may be none, are written. Returns at once.

        Args:
            names: of the destinations.
            values: what later regions of the program read, and what it returns; ``None`` where that is not known.
        """
        ...


class RegionObserver(Protocol):
    """Told when regions run, to draw a measured step."""

    def region_started(self, name: str) -> None: ...

    def region_finished(self, name: str) -> None: ...
