"""What fakes of a communicator have in common: nobody asks one for values, and nobody hears what it is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch


class SilentCommunicator:
    """The part of a ``Communicator`` that says nothing of where destinations lie and what has been written."""

    def anchor(self, names: Sequence[str]) -> torch.Tensor:
        return torch.empty(0, requires_grad=True)

    def wanted_values(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset()

    def take_values(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def expect(self, node: Any, names: Sequence[str]) -> None: ...

    def leave_out(self, node: Any, results_of: Mapping[str, Collection[int]]) -> None: ...
