"""Nodes in the place of a part of a joint graph that is computed row by row (``rows.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

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
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda read: read.meta["val"])
        meta = {name: value for name, value in like.meta.items() if name != "custom"}
        node.meta = {**meta, "val": target(*fake_args, **fake_kwargs)}
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
        _put_in_order(self.graph)


def _put_in_order(graph: Graph) -> None:
    """Moves nodes behind what they read; those that need not be moved stay in their order."""
    placed: set[Node] = set()
    order: list[Node] = []
    for wanted in list(graph.nodes):
        pending = [wanted]
        while pending:
            node = pending[-1]
            missing = [] if node in placed else [read for read in node.all_input_nodes if read not in placed]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if node not in placed:
                placed.add(node)
                order.append(node)
    for node in order:
        graph.output_node().prepend(node)
