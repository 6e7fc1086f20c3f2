"""What fakes of a communicator have in common: nobody asks one for values, and it is its own destinations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch


class SilentCommunicator:
    """The part of ``Communicator`` and ``Destinations`` that says nothing of where they lie and what is written."""

    def anchor(self, names: Sequence[str]) -> torch.Tensor:
        return torch.empty(0, requires_grad=True)

    def wanted_values(self, names: Sequence[str]) -> dict[str, Any]:
        return {}

    def expect(self, node: Any, names: Sequence[str]) -> None: ...

    def begin(self, node: Any, undefined: Mapping[str, Collection[int]]) -> Self:
        return self

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None: ...
