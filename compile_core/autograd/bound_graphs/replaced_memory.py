"""Parameters that get other memory between a forward and its backward.

After ``parameter.data = ...`` an operator of eager PyTorch that has saved the parameter finds the new memory in its
backward. One that is given a view or a cast of it, as a linear layer is that transposes its weight, has saved that, in
the storage of the forward. A program saves the parameter itself in both cases. Limit: a parameter that operators use in
both ways counts as viewed.

A storage itself may have been freed and made again, as FSDP does with every layer: then it has another address, and
what lay in it is found where it lay in the storage. So places are told by storage and offset, and an address tells only
that nothing has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.pick import Pick, picker

_address_of = torch.Tensor.data_ptr
_offset_of: Any = torch.Tensor.storage_offset

# Addresses, offsets, and of parameters the storages.
Memories = tuple[list[int], list[int], list[torch.UntypedStorage | None]]


@dataclass(frozen=True)
class ViewedInputs:
    """What is saved of the inputs that a graph's forward views or casts.

    Attributes:
        positions: among what is saved.
        pick: finds those.
        like: for each, a fake tensor of its layout.
    """

    positions: tuple[int, ...]
    pick: Pick
    like: tuple[torch.Tensor, ...]

    @staticmethod
    def of(graph: PartitionedGraph) -> ViewedInputs | None:
        """``None`` if there are none."""
        viewed = {
            node.name: node.meta["val"]
            for node in graph.forward.graph.find_nodes(op="placeholder")
            if any(map(_views_or_casts, node.users))
        }
        positions = tuple(k for k, name in enumerate(graph.saved) if name in viewed)
        if not positions:
            return None
        return ViewedInputs(positions, picker(positions), tuple(viewed[graph.saved[k]] for k in positions))

    def memories(self, saved: Sequence[Any]) -> Memories:
        """Where those lie in a forward. As long as this is kept, which may be longer than what is saved, so is the
        memory of parameters."""
        tensors = self.pick(saved)
        storages = [
            tensor.untyped_storage() if isinstance(tensor, torch.nn.Parameter) else None for tensor in tensors
        ]
        return [*map(_address_of, tensors)], [*map(_offset_of, tensors)], storages

    def restore(self, saved: list[Any], memories: Memories) -> None:
        """Parameters that have other memory by now are replaced by tensors in the one that they had."""
        tensors = self.pick(saved)
        if [*map(_address_of, tensors)] == memories[0]:
            return
        for k, tensor, address, offset, storage, like in zip(
            self.positions, tensors, *memories, self.like, strict=True
        ):
            # What hooks for saved tensors have kept somewhere else is what it was.
            is_itself = isinstance(tensor, torch.nn.Parameter)
            if storage is not None and is_itself and tensor.data_ptr() != address:
                empty = torch.empty(0, dtype=like.dtype, device=storage.device)
                saved[k] = empty.set_(storage, offset, like.shape, like.stride())  # type: ignore[call-overload]


def _views_or_casts(user: torch.fx.Node) -> bool:
    return getattr(user.target, "is_view", False) or user.target is torch.ops.aten._to_copy.default
