"""A broadcast between threads that play ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.distributed.agreement.session import HandOut


class HandedOut:
    """What the first rank of some threads hands out."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self.collectives = [0] * 4
        self._values = torch.empty(0)

    def by(self, rank: int) -> HandOut:
        def begin(values: torch.Tensor) -> Any:
            if rank == 0:
                self._values = values
                self._given.set()
            return _Received(self._given, values, lambda: self._values)

        return HandOut(begin, torch.device("cpu"), lambda: self.collectives[rank])


@dataclass
class _Received:
    """A broadcast under way."""

    given: threading.Event
    values: torch.Tensor
    result: Callable[[], torch.Tensor]

    def is_completed(self) -> bool:
        return self.given.is_set()

    def wait(self) -> None:
        self.values.copy_(self.result())
