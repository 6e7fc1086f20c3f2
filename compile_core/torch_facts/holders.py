"""What holds a tensor's memory."""

from __future__ import annotations

import math
from functools import cache

import torch

from gradsplit.compile_core.torch_facts.autograd_engine import storage_use_count
from gradsplit.compile_core.torch_facts.private_parts import private

_use_count = private(
    "torch:Tensor._use_count",
    "whether a gradient may be computed into the memory of a saved tensor",
    "gradients get memory of their own",
    lambda tensor: math.nan,  # which is no number of holders
)


def is_held_once(tensor: torch.Tensor, elements: int = 0) -> bool:
    """Whether one Python object is all that holds a tensor, and the tensor all that holds its memory.

    How often the object is referred to is for the caller to look at.

    Args:
        elements: how many of the tensor's dtype there must be in that memory, from the tensor's first one on.
    """
    if _holders(tensor) != _holders_of_one():
        return False
    return (tensor.storage_offset() + elements) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _holders(tensor: torch.Tensor) -> tuple[float, float]:
    return _use_count(tensor), storage_use_count(tensor.untyped_storage()._cdata)


@cache
def _holders_of_one() -> tuple[float, float]:
    """As counted of a tensor that was just made: to count takes references, too."""
    return _holders(torch.empty(1))
