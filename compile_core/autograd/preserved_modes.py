"""Keeps a trace's changes of torch's modes to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from compile_core.ir.torch_switches import preserved_switches, without_saved_tensor_hooks

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def preserved_modes() -> Iterator[None]:
    """Torch's modes and switches are afterwards as before, also where the graph failed between two switches.

    Inside, autocast keeps no casts: they would be casts of tensors that are not real. Nor does anomaly mode look for
    NaN in them, or a hook for what autograd saves get them.
    """
    with preserved_switches(), without_saved_tensor_hooks():
        torch.set_autocast_cache_enabled(False)
        torch.set_anomaly_enabled(False)
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
