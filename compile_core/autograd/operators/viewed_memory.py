"""Which memory a value of a traced graph lies in: its own, or that of a value which it is a view of."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

aten = torch.ops.aten


def memory_of(node: Node) -> Node:
    """The node whose memory a value lies in: the node itself unless it is a view."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: Node) -> Node | None:
    if node.op != "call_function":
        return None
    # ``_unsafe_view`` promises that nobody will mind the sharing; a caller who gets both tensors would.
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None
