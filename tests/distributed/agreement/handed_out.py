"""A sum between threads that play ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsplit.distributed.agreement.session import HandOut


class HandedOut:
    """What the first rank of some threads hands out, when all have come.

    Args:
        size: how many they are.
    """

    def __init__(self, size: int = 2) -> None:
        self.collectives = [0] * 4
        self._size = size
        self._sum = _Sum()

    def by(self, rank: int) -> HandOut:
        def begin(values: torch.Tensor) -> Any:
            with self._sum.lock:
                self._sum.values.append(values)
                if len(self._sum.values) == self._size:
                    self._sum.is_there.set()
            return _Received(self._sum, values)

        return HandOut(begin, torch.device("cpu"), lambda: self.collectives[rank])


@dataclass
class _Sum:
    values: list[torch.Tensor] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_there: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Received:
    """A sum under way."""

    sum: _Sum
    values: torch.Tensor

    def is_completed(self) -> bool:
        return self.sum.is_there.is_set()

    def wait(self) -> None:
        self.values = self.values.copy_(torch.stack([values.clone() for values in self.sum.values]).amax(0))
