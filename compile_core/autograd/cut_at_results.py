"""Cuts a captured graph behind each result that other results are computed from.

To autograd the results of one graph are siblings. Cut up, each piece is a graph of its own that takes the results of
earlier pieces as inputs, so that autograd links them as in plain PyTorch: the gradient of a loss with respect to a
feature map that is a result, too, is found, and hooks of the feature map see all of its gradient. The price is what
could have been fused, or saved more cheaply, across a cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compile_core.errors import Unsupported
from compile_core.ir.lazy_modules import lazy_module


@dataclass(frozen=True)
class Piece:
    """A part of a graph; ``inputs`` and ``outputs`` are names of the whole graph's nodes."""

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class LinkedPieces:
    """Pieces that run one after the other, as the graph that they were cut from.

    Attributes:
        inputs: names of the graph's placeholders.
        outputs: names of its results.
        pieces: what is called for each piece, with what it takes and returns.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pieces: tuple[tuple[Piece, Callable[..., Sequence[torch.Tensor]]], ...]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.inputs, tensors, strict=True))
        for piece, run in self.pieces:
            results = run(*(values[name] for name in piece.inputs))
            values.update(zip(piece.outputs, results, strict=True))
        return tuple(values[name] for name in self.outputs)


def link_pieces(
    module: GraphModule, pieces: Sequence[Piece], runs: Sequence[Callable[..., Any]]
) -> LinkedPieces:
    """Joins what the pieces of ``module`` were compiled to."""
    (output,) = module.graph.find_nodes(op="output")
    return LinkedPieces(
        tuple(node.name for node in module.graph.find_nodes(op="placeholder")),
        tuple(node.name for node in output.args[0]),
        tuple(zip(pieces, runs, strict=True)),
    )


def cut_at_results(module: GraphModule) -> list[Piece]:
    """The pieces in order: one, the graph itself, if no result is computed from another.

    Raises:
        Unsupported: something else than tensors passes from one piece to the next: a number, or a mode of torch.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    results = set(output.args[0])
    ends = {node for node in results if node not in placeholders and _has_heirs(node, results)}
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
            place += node in ends
    return [_piece(module, place_of, place, results) for place in sorted(set(place_of.values()))]


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


def _has_heirs(result: Node, results: set[Node]) -> bool:
    """Whether gradients flow into it from another result, in other memory."""
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
            if user in results and made.requires_grad and not _share_memory(made, value):
                return True
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _piece(module: GraphModule, place_of: Mapping[Node, int], place: int, results: set[Node]) -> Piece:
    own = [node for node in module.graph.nodes if place_of.get(node) == place]
    outputs = [
        node
        for node in own
        if node in results or any(place_of.get(user, place) != place for user in node.users)
    ]
    sources = dict.fromkeys(source for node in own for source in node.all_input_nodes)
    inputs = [node for node in sources if node not in own and node.op != "get_attr"]
    for node in (*inputs, *outputs):
        if not isinstance(node.meta["example_value"], torch.Tensor):
            raise Unsupported("linked-results", f"{node} passes between the pieces of a program")
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in own or (node.op == "get_attr" and node in sources):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(lazy_module(module, graph), _names(inputs), _names(outputs))
