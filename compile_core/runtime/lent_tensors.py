"""Tensors over memory of a recording that torch's allocator takes to be free.

It is free for what is recorded in the same memory, and for nobody else: the allocator keeps the memory of a graph as
long as the graph lives, which these tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Memory:
    """What ``torch.as_tensor`` makes a tensor of, which then holds this object."""

    def __init__(self, storage: torch.UntypedStorage, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


def lent_tensors(tensors: Sequence[torch.Tensor], owner: object) -> list[torch.Tensor]:
    """Tensors at the addresses of others, which hold ``owner`` instead of the others' memory.

    Those that share memory do so again. What has no elements stays what it is.
    """
    memories: dict[int, Any] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            found.append(tensor)
            continue
        key = storage.data_ptr()
        if key not in memories:
            memories[key] = torch.as_tensor(_Memory(storage, owner), device=tensor.device).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = int(tensor.storage_offset())
        found.append(empty.set_(memories[key], offset, tensor.shape, tensor.stride()))
    return found
