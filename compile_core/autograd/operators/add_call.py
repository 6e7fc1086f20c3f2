"""A call that a pass adds to a graph, with its fake result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def add_call(
    graph: Graph, like: Node | None, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> Node:
    """The call's node. It belongs where ``like`` does: to the same checkpoint, to the backward or not."""
    node = graph.call_function(operator, args, kwargs)
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda read: read.meta["val"])
    node.meta = {**(like.meta if like is not None else {}), "val": operator(*fake_args, **fake_kwargs)}
    return node
