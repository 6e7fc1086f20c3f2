"""Keeps a trace's changes of torch's modes to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from compile_core.ir.torch_switches import preserved_switches

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def preserved_modes() -> Iterator[None]:
    """Torch's modes and switches are afterwards as before, also where the graph failed between two switches.

    Inside, autocast keeps no casts: they would be casts of tensors that are not real.
    """
    with preserved_switches():
        torch.set_autocast_cache_enabled(False)
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast on any device, as where a backward runs."""
    enabled = [(device, torch.is_autocast_enabled(device)) for device in _AUTOCAST_DEVICES]
    for device, _ in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device, was_enabled in enabled:
            torch.set_autocast_enabled(device, was_enabled)
