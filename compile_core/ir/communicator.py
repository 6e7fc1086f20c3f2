"""What a compiled program needs of whatever reduces its gradients across processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

# Takes its inputs in a list that it may empty; a backward that stores gradients also takes ``destinations``.
Program = Callable[..., Sequence[Any]]

# By destination, who gets the value of its gradient.
WantedValues = Mapping[str, Callable[[torch.Tensor], None]]


class Communicator(Protocol):
    """Owns the places that destinations name, and the collectives over them.

    What is started when is not the program's concern: gradients of one collective may come from several programs.
    """

    def anchor(self, names: Sequence[str]) -> torch.Tensor:
        """A tensor that requires a gradient and never gets one. It stands for the inputs of a program whose gradients
        are stored in these destinations: the engine reaches it exactly where it is to accumulate them."""
        ...

    def expect(self, node: Any, names: Sequence[str]) -> None:
        """Called in a forward: when the engine runs ``node`` of autograd's graph, these destinations are written."""
        ...

    def wanted_values(self, names: Sequence[str]) -> WantedValues:
        """Called first in a backward: those of these destinations whose gradients are requested as values, which are
        given unless they are undefined. If there are any, the program stores nothing: it does not ``begin``."""
        ...

    def begin(self, node: Any, undefined: Mapping[str, Collection[int]]) -> Destinations:
        """The engine runs the backward of ``node``.

        Args:
            undefined: destinations that are undefined, with the results of the node that each depends on: no gradient
                came to any of these.
        """
        ...


class Destinations(Protocol):
    """Where one run of a backward stores. It asks before each region, and says after it what is written."""

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        """What ``destinations`` will give for these, where these are the tensors that a backward stores to as a rule:
        only another plan moves them. ``None`` in an exceptional run, whose results are not stored or come on top of
        others."""
        ...

    def destinations(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """The tensors into which the program stores the results of these destination names."""
        ...

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        """Called after each region: these destinations, which may be none, are written. Returns at once.

        Args:
            names: of the destinations.
            values: what later regions of the program read, and what it returns; ``None`` where that is not known.
        """
        ...


class RegionObserver(Protocol):
    """Called when regions run, to draw a measured step."""

    def region_started(self, name: str) -> None: ...

    def region_finished(self, name: str) -> None: ...
