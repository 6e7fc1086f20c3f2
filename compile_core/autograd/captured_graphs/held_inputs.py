"""Which inputs of a captured graph may be taken to stay as they are from call to call: the option ``freezing``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir.captured import GraphInput


def held_inputs(entries: Sequence[GraphInput], given: Sequence[Any]) -> frozenset[int]:
    """Positions of parameters and buffers whose changes can be noticed, where gradients are off; else none.

    Args:
        entries: the graph's inputs.
        given: the real ones of the first call.
    """
    if torch.is_grad_enabled():
        return frozenset()
    pairs = enumerate(zip(entries, given, strict=True))
    return frozenset(position for position, (entry, real) in pairs if _is_held(entry, real))


def _is_held(entry: GraphInput, real: Any) -> bool:
    if entry.kind not in ("parameter", "buffer") or type(real) not in (Tensor, torch.nn.Parameter):
        return False
    # What is made in inference mode counts no changes.
    if entry.is_open or real.is_inference() or real.layout != torch.strided or real.numel() == 0:
        return False
    # Elsewhere it would take a wait for the device to compare what they hold.
    return entry.kind == "parameter" or real.device.type == "cpu" or not _may_be_a_statistic(real)


def is_compared(tensor: Tensor) -> bool:
    """Whether what a held tensor holds is to be compared with what it held."""
    return tensor.device.type == "cpu" and _may_be_a_statistic(tensor)


def _may_be_a_statistic(tensor: Tensor) -> bool:
    """Of running statistics torch does not count the changes that a batch norm makes."""
    return tensor.dim() == 1 and tensor.is_floating_point() and not tensor.requires_grad
