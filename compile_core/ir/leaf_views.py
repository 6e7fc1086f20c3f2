"""Leaves that are views of tensors without gradients: what is a view of them has that base, too."""

from __future__ import annotations

import torch


def is_view_as_leaf(tensor: torch.Tensor) -> bool:
    """Whether a view of it that is made without gradients does not require any, though the tensor itself does."""
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad
