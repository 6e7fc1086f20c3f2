"""What a program writes into stays where it lies in memory.

Functionalization replaces a write in place by the operator that makes a new value, and takes over how that one lies in
memory, which for a transposed tensor may be otherwise (``cumsum_``, ``scatter_add_``) and for one with gaps mostly is.
What comes after it asks for that: ``reshape`` is a view or a copy by it, ``as_strided`` reads other elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.dispatcher import (
    commit_update,
    count_writes,
    from_functional,
    is_functional,
    replace_value,
    sync,
    without_functionalization,
)


@contextmanager
def kept_layouts(given: Iterable[Any]) -> Iterator[None]:
    """For a call that is given these: the tensors among them that it writes into keep their strides."""
    before = [
        (tensor, count_writes(tensor), tensor.shape, tensor.stride())
        for tensor in given
        if isinstance(tensor, torch.Tensor) and is_functional(tensor)
    ]
    yield
    for tensor, writes, shape, strides in before:
        if count_writes(tensor) != writes and tensor.shape == shape and tensor.stride() != strides:
            _lay_out(tensor, strides)


def _lay_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    sync(tensor)
    with without_functionalization(), torch.no_grad():
        value = from_functional(tensor)
        place = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        value = torch.ops.aten.copy.default(place, value)
    replace_value(tensor, value)
    commit_update(tensor)
    sync(tensor)
