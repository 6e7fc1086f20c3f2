"""Nodes in the place of a part of a joint graph that is computed row by row (``rows.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call, sources_first
from gradsplit.compile_core.autograd.rewrites.rows import Rows, reshaped

aten = torch.ops.aten


class PartWriter:
    """Makes the nodes, all of them before the part's product, and puts the graph in order at last.

    Attributes:
        graph: it.
        rows: the part.
        replaced: what stands for values from outside.
    """

    def __init__(self, graph: Graph, rows: Rows) -> None:
        self.graph = graph
        self.rows = rows
        self.product = rows.product
        self.mode = self.product.meta["val"].fake_mode
        self.replaced: dict[Node, Node] = {}
        self._flat: dict[tuple[Node, tuple[int, ...]], Node] = {}

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node that computes what ``like`` is about, without its marks: it need not belong to the backward."""
        node = add_call(self.graph, like, target, *args, **kwargs)
        node.meta.pop("custom", None)
        return node

    def outer(self, value: Node) -> Node:
        """What stands for a value from outside."""
        return self.replaced.get(value, value)

    def flat(self, value: Node, shape: tuple[int, ...], lead: int) -> Node:
        """A value from outside with one dim of rows, beside one of this shape that has the first ``lead``.

        Where it has some of them only, it is spread over all.
        """
        value = self.outer(value)
        given = tuple(value.meta["val"].shape)
        full = (1,) * (len(shape) - len(given)) + given
        if lead == 1 and full == given and full[0] == self.rows.count:
            return value
        key = value, shape[:lead]
        if key not in self._flat:
            spread = value
            if full[:lead] != shape[:lead]:
                spread = self.call(value, aten.expand.default, value, [*shape[:lead], *full[lead:]])
            self._flat[key] = self.reshaped(value, spread, [self.rows.count, *full[lead:]])
        return self._flat[key]

    def reshaped(self, like: Node, value: Node, shape: Iterable[int]) -> Node:
        """The value in a shape, itself if it has that."""
        wanted = list(shape)
        return value if list(value.meta["val"].shape) == wanted else reshaped(self.call, like, value, wanted)

    def finish(self, nodes: Iterable[Node], results: Mapping[Node, Node]) -> None:
        """Takes the part out of the graph, with these results in the place of its nodes'."""
        inside = set(nodes)
        for node, value in results.items():
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
        for node in reversed([node for node in self.graph.nodes if node in inside]):
            self.graph.erase_node(node)
        in_order = list(self.graph.nodes)
        for node in sources_first(in_order, set(in_order)):
            self.graph.output_node().prepend(node)
