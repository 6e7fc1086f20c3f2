"""Keeps a trace's changes of torch's modes to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradsplit.compile_core.torch_facts.torch_switches import (
    preserved_dispatch_keys,
    preserved_switches,
    without_saved_tensor_hooks,
)


@contextmanager
def preserved_modes() -> Iterator[None]:
    """Torch's modes and switches are afterwards as before, also where the graph failed between two switches.

    Inside, autocast keeps no casts: they would be casts of tensors that are not real. Nor does anomaly mode look for
    NaN in them, or a hook for what autograd saves get them.
    """
    with preserved_dispatch_keys(), preserved_switches(), without_saved_tensor_hooks():
        torch.set_autocast_cache_enabled(False)
        torch.set_anomaly_enabled(False)
        yield
