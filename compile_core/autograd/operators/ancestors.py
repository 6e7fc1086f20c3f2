"""What values of a graph are computed from."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx import Node


def ancestors(values: Iterable[Node], down_to: Container[Node] = ()) -> set[Node]:
    """The values and all that they are computed from, as far as the nodes ``down_to``."""
    found: set[Node] = set()
    frontier = list(values)
    while frontier:
        node = frontier.pop()
        if node not in found:
            found.add(node)
            if node not in down_to:
                frontier.extend(node.all_input_nodes)
    return found
