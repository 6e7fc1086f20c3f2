"""Which parameters the backwards that run still read, found by memory, so that views of a parameter count as it does.

A backward program says after each region what the later ones read. What it returns to autograd may be read by anybody;
so a parameter in there counts as read until the round is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ParameterReaders:
    """Follows the programs of one round, which run one after the other.

    Attributes:
        read: the names of the parameters that are still read.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._owners: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            self._owners.setdefault(_memory(parameter), []).append(name)
        self._all = frozenset(parameters)
        self.read: set[str] = set()
        # The values of the running program that lie in parameters; all those that were looked at.
        self._held: dict[str, list[str]] = {}
        self._seen: set[str] = set()
        self._returned: set[str] = set()

    def program_begins(self) -> None:
        self._returned |= self.read
        self._held, self._seen = {}, set()

    def region_ended(self, values: Mapping[str, torch.Tensor] | None) -> None:
        """
        Args:
            values: what later regions of the program read, and what it returns; ``None`` where that is not known.
        """
        if values is None:
            self.read.update(self._all)
            return
        for name in values.keys() - self._seen:
            self._seen.add(name)
            value = values[name]
            if isinstance(value, torch.Tensor) and (owners := self._owners.get(_memory(value))):
                self._held[name] = owners
        self.read = set(self._returned)
        for name, owners in self._held.items():
            if name in values:
                self.read.update(owners)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
