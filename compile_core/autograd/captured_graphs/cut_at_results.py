"""Cuts a captured graph behind each result that other results are computed from, and behind changes of such inputs.

To autograd the results of one graph are siblings. Cut up, each piece is a graph of its own that takes the results of
earlier pieces as inputs, so that autograd links them as in plain PyTorch: the gradient of a loss with respect to a
feature map that is a result, too, is found, and hooks of the feature map see all of its gradient. The price is what
could have been fused, or saved more cheaply, across a cut.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.pieces import Piece, cut_graph
from gradsplit.compile_core.errors import Unsupported


def cut_at_results(module: GraphModule) -> list[Piece]:
    """The pieces in order: one, the graph itself, if no result is computed from another.

    Raises:
        Unsupported: something else than tensors passes from one piece to the next: a number, or a mode of torch.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    results = set(output.args[0])
    last_writes = _last_writes(module)
    # An input is a result where it is changed in place.
    parents = {node for node in results if node not in placeholders}
    parents |= {node for node in placeholders if _memory(node) in last_writes}
    ends = {last_writes.get(_memory(node), node) for node in parents if _has_heirs(node, results)}
    if not ends:
        return [Piece(module, _names(placeholders), _names(output.args[0]))]
    place_of: dict[Node, int] = {}
    place = 0
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            _check_passable(node)
            # Items stay with the operation that has several results.
            whole: Any = node.args[0] if node.target is operator.getitem else None
            place_of[node] = place_of.get(whole, place) if _is_sequence(whole) else place
            _check_shape(node, place_of)
            place += node in ends
    return cut_graph(module, place_of)


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _is_sequence(node: Node | None) -> bool:
    return node is not None and isinstance(node.meta["example_value"], (tuple, list))


def _check_passable(node: Node) -> None:
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor) and not _is_sequence(node):
        raise Unsupported("linked-results", f"{node} is no tensor, in a program with results of results")
    if isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
        raise Unsupported("linked-results", f"{node} has open sizes, in a program with results of results")


def _check_shape(node: Node, place_of: Mapping[Node, int]) -> None:
    """Refuses to cut between a tensor and a change of its shape: pieces know the shape that it has in the end."""
    if _is_in_place(node) and torch.Tag.inplace_view in _tags(_name(node)):
        for part in _written(node):
            if place_of.get(part, 0) != place_of[node]:
                raise Unsupported(
                    "linked-results", f"{part} gets another shape after results were computed from it"
                )


@functools.cache
def _tags(name: str) -> frozenset[torch.Tag]:
    """Of the overloads of an operator."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return frozenset(tag for overload in overloads for tag in overload.tags)


def _has_heirs(result: Node, results: set[Node]) -> bool:
    """Whether gradients flow into it from another result. In its own memory that is made as a view of it, if it is no
    view itself."""
    value = result.meta["example_value"]
    seen = {result}
    waiting = [result] if value.requires_grad else []
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


def _last_writes(module: GraphModule) -> dict[int | None, Node]:
    """By memory, the last operation that changes it in place."""
    return {
        _memory(part): node
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method") and _is_in_place(node)
        for part in _written(node)
    }


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_in_place(node: Node) -> bool:
    name = _name(node)
    return node.target is operator.setitem or "out" in node.kwargs or (name[-1:] == "_" and name[:1] != "_")


def _written(node: Node) -> list[Node]:
    parts = [*node.args[:1], node.kwargs.get("out")]
    return [
        part
        for part in parts
        if isinstance(part, Node) and isinstance(part.meta["example_value"], torch.Tensor)
    ]


def _memory(node: Node) -> int | None:
    value = node.meta["example_value"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
