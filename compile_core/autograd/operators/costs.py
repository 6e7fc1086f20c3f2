"""What an operator costs, estimated from its fake values: operations and bytes. Nothing is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from gradsplit.compile_core.autograd.operators.kinds import packet
from gradsplit.compile_core.ir.row_chunks import ADD_PRODUCT, WIDE_PRODUCT
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation


def operations_of(node: Node) -> int:
    """The floating-point operations of a product, convolution or attention; 0 for what only moves data.

    Sizes are those of the call that is compiled for: that two are equal becomes no condition.
    """
    is_chunk = node.target in (WIDE_PRODUCT, ADD_PRODUCT)
    formula = flop_registry.get(torch.ops.aten.mm if is_chunk else packet(node))
    if formula is None:
        return 0
    given = node.args[-2:] if is_chunk else node.args
    args, kwargs = map_arg((given, node.kwargs), lambda value: value.meta["val"])
    # Torch wraps formulas that take shapes into ones that take tensors, too.
    if hasattr(formula, "__wrapped__"):
        args, kwargs, result = tree_map(_shape_at_compilation, (args, kwargs, node.meta["val"]))
    else:
        result = node.meta["val"]
    try:
        return value_at_compilation(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError, ValueError):
        # Not every version's formulas know all that its operators take, as fewer heads of keys than of queries.
        return 0


def _shape_at_compilation(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Size(value_at_compilation(size) for size in value.shape)
    return value_at_compilation(value)


def moved_bytes(node: Node) -> int:
    """The bytes that the operator reads and writes if all of its values lie in memory."""
    return sum(result_bytes(value) for value in (node, *node.all_input_nodes))


def result_bytes(node: Node) -> int:
    """The bytes of a node's tensors; a number has none."""
    leaves: list[Any] = tree_leaves(node.meta.get("val"))
    return sum(
        value_at_compilation(leaf.numel()) * leaf.dtype.itemsize
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )
