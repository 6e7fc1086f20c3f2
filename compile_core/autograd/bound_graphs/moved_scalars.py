"""A compiled graph that takes numbers on the CPU, and hands them on in tensors of a GPU: see
``captured_graphs.host_scalars``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class MovedScalars:
    """Called with a graph's inputs, it runs ``run`` with them, some on other devices.

    Args:
        run: the compiled graph.
        devices: by the positions of the inputs that are moved.
    """

    def __init__(self, run: Callable[..., Any], devices: Mapping[int, torch.device]) -> None:
        self.run = run
        self._devices = devices

    @property
    def programs(self) -> Any:
        return self.run.programs  # type: ignore[attr-defined]

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        return self.run(*moved(inputs, self._devices))


def moved(inputs: Sequence[Any], devices: Mapping[int, torch.device]) -> list[Any]:
    """The inputs with such tensors on the devices; nothing waits for that."""
    return [
        # A kernel's argument, where a copy would read memory that the program may have changed by then.
        torch.full((), given.item(), dtype=given.dtype, device=devices[k]) if k in devices else given
        for k, given in enumerate(inputs)
    ]
