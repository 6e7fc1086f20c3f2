"""Operators that combine values with a tensor's elements at indices, and that a generated kernel may do."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten

_SCATTERS = frozenset(
    {aten.index_add.default, aten.scatter_add.default, aten.index_put.default, aten.scatter_reduce.two}
)


def combines_at_indices(node: Node) -> bool:
    """Whether a node combines values at indices, and a kernel may do it that takes points in any order, as it may not
    where the program wants determinism."""
    if node.target not in _SCATTERS or node.meta["val"].dtype == torch.bool:
        return False
    accumulates = node.target is not aten.index_put.default or node.args[3:4] == (True,)
    return accumulates and not torch.are_deterministic_algorithms_enabled()
