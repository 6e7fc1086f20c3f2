"""Keeps a trace's changes of torch's modes to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def preserved_modes() -> Iterator[None]:
    """Grad mode and autocast are afterwards as before, also where the traced graph failed between two of its switches.

    Inside, autocast keeps no casts: they would be casts of tensors that are not real.
    """
    grad_enabled = torch.is_grad_enabled()
    cache_enabled = torch.is_autocast_cache_enabled()
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ]
    depth = torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        while torch.autocast_decrement_nesting() >= depth:
            pass
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache_enabled)
        torch.set_grad_enabled(grad_enabled)


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
