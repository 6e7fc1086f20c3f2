"""Cuts a captured graph behind each result that other results are computed from, and behind changes of such inputs.

To autograd the results of one graph are siblings. Cut up, each piece is a graph of its own that takes the results of
earlier pieces as inputs, so that autograd links them as in plain PyTorch: the gradient of a loss with respect to a
feature map that is a result, too, is found, and hooks of the feature map see all of its gradient. The price is what
could have been fused, or saved more cheaply, across a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points
from gradsplit.compile_core.autograd.captured_graphs.pieces import Piece, cut_graph
from gradsplit.compile_core.errors import Unsupported


def cut_at_results(module: GraphModule, examples: Sequence[Any]) -> list[Piece]:
    """The pieces in order: one, the graph itself, if no result is computed from another.

    Args:
        examples: a fake tensor or a number for each placeholder.

    Raises:
        Unsupported: something else than tensors passes from one piece to the next: a number, or a mode of torch; or the
            graph does not run on fake tensors.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    results = set(output.args[0])
    points = find_cut_points(module, examples)
    # An input is a result where it is changed in place.
    parents = [node for node in placeholders if node in points.changed_at]
    parents += [node for node in points.nodes if node in results]
    position_of = {node: position for position, node in enumerate(points.nodes)}
    ends = {
        points.changed_at.get(node, position_of.get(node, -1))
        for node in parents
        if points.needs_gradient(node) and _has_heirs(node, results)
    }
    if not ends:
        return [Piece(module, _names(placeholders), _names(output.args[0]))]
    for node in points.nodes:
        _check_passable(node)
    place_of = points.places(end + 1 for end in ends)
    # Pieces know the shape that a tensor has in the end.
    for node, position in points.reshaped_at.items():
        if place_of.get(node, 0) != place_of[points.nodes[position]]:
            raise Unsupported(
                "linked-results", f"{node} gets another shape after results were computed from it"
            )
    return cut_graph(module, place_of, points.examples(place_of, examples))


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _check_passable(node: Node) -> None:
    value = node.meta["example_value"]
    if not isinstance(value, (torch.Tensor, tuple, list)):
        raise Unsupported("linked-results", f"{node} is no tensor, in a program with results of results")
    if isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
        raise Unsupported("linked-results", f"{node} has open sizes, in a program with results of results")


def _has_heirs(result: Node, results: set[Node]) -> bool:
    """Whether gradients flow from another result into this one, which requires them. In its own memory that is made as
    a view of it, if it is no view itself."""
    value = result.meta["example_value"]
    seen = {result}
    waiting = [result]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            waiting.append(user)
            made = user.meta["example_value"]
            if user not in results or not made.requires_grad:
                continue
            if value._is_view() or not _share_memory(made, value):
                return True
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
