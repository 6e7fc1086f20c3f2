"""Where one run of a compiled program stores gradients: the ``Destinations`` that ``DDPCommunicator`` gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.gradients.round import Round


class ProgramRun:
    """Of a program in a round.

    Args:
        round_: ``None`` where the backward is for gradients of inputs only: what the program stores is dropped.
        missing: gradients to which nothing comes, whatever the program stores.
        zeros: those that count as zeros.
    """

    def __init__(
        self,
        buckets: Buckets,
        round_: Round | None,
        missing: frozenset[str] = frozenset(),
        zeros: frozenset[str] = frozenset(),
    ) -> None:
        self._buckets, self._round = buckets, round_
        self._missing, self._zeros = missing, zeros
        # What does not go to its place.
        self._scratch: dict[str, torch.Tensor] = {}

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        return None if self._round is None else self._round.places(names)

    def destinations(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        if (places := self.usual_places(names)) is not None:
            return places
        self._scratch = {name: self._buckets.empty_gradient(name) for name in names}
        return [*self._scratch.values()]

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        scratch, self._scratch = self._scratch, {}
        if self._round is None:
            return
        zeros = self._zeros.intersection(names) - self._round.stored
        for name, contribution in scratch.items():
            if name not in self._missing and name not in self._zeros:
                self._round.add_stored(name, contribution)
        self._round.programs_stored(names, self._missing, zeros)
        if self._buckets.stepper is not None:
            self._buckets.stepper.region_ended(values)
