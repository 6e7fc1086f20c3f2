"""Autograd counts the changes of a tensor, to notice that one it has saved is no longer what it was."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tell_of_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Counts a change of each, which autograd has not seen. What is made in inference mode has no versions."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
