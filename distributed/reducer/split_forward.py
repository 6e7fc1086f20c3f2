"""Splits a captured forward on the reducer's buckets, so that each piece's backward completes one.

The classic way to overlap (torch's DDPOptimizer): the reducer's hooks fire when a parameter's gradient is accumulated,
hence between the backwards of two pieces. A gradient is final when the backward of its *first* use has run, so a bucket
is complete after the first use of all of its parameters, and of those of the buckets before it, which the reducer
starts in order. There a piece begins; where the graph cannot be cut (``cut_points``), it begins earlier.

Parameters are recognised by identity among the graph's inputs, so it does not matter how the program came by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points
from gradsplit.compile_core.autograd.captured_graphs.pieces import Piece, cut_graph
from gradsplit.distributed.reducer.arrival_order import arrival_order

# The parameters that the reducer reduces together, in the order in which it starts the buckets.
Buckets = Sequence[Sequence[torch.Tensor]]


class SplitForward:
    """What is known of a captured graph that is to be split.

    Args:
        examples: a fake tensor or number for each of the graph's inputs.
        inputs: the real ones.

    Attributes:
        changes_inputs: the graph changes an input in place.
        ready_order: the parameters, in the order in which their gradients arrive in plain PyTorch.
        arrival_order: the positions of those among the inputs that are in the memory of no result.

    Raises:
        Unsupported: a limit of ``cut_points``.
    """

    def __init__(self, module: GraphModule, examples: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._module = module
        self._examples = examples
        self._points = find_cut_points(module, examples)
        self.changes_inputs = bool(self._points.changed_at)
        values = self._points.values
        placeholders = module.graph.find_nodes(op="placeholder")
        (output,) = module.graph.find_nodes(op="output")
        results = [values[node] for node in output.args[0]]
        parameters = {
            given: node
            for node, given in zip(placeholders, inputs, strict=True)
            if isinstance(given, torch.nn.Parameter)
        }
        self._first_uses = self._find_first_uses(parameters)
        self.ready_order = arrival_order(
            results, {parameter: values[node] for parameter, node in parameters.items()}
        )
        # A result in the memory of a parameter, or the parameter itself, must be of that very parameter.
        returned = {result.untyped_storage()._cdata for result in results}
        positions = {node: position for position, node in enumerate(placeholders)}
        arriving = [parameters[parameter] for parameter in self.ready_order]
        self.arrival_order = tuple(
            positions[node] for node in arriving if values[node].untyped_storage()._cdata not in returned
        )

    def begins(self, buckets: Buckets) -> tuple[int, ...]:
        """Where pieces begin beside the first, as positions among the graph's operations."""
        begins: list[int] = []
        complete = len(self._points.nodes)
        for bucket in buckets:
            places = [self._first_uses[parameter] for parameter in bucket if parameter in self._first_uses]
            if places:
                complete = min(complete, *places)
                complete = next((place for place in range(complete, 0, -1) if self._points.allowed[place]), 0)
                if complete and complete not in begins:
                    begins.append(complete)
        # There is nothing to wait for in a beginning without gradients.
        while begins and not any(map(self._points.needs_gradient, self._points.nodes[: begins[-1]])):
            begins.pop()
        return tuple(reversed(begins))

    def pieces(self, begins: Sequence[int]) -> list[Piece]:
        """The pieces that begin there.

        Raises:
            Unsupported: a limit of ``cut_graph``.
        """
        place_of = self._points.places(begins)
        pieces = cut_graph(self._module, place_of, self._points.examples(place_of, self._examples))
        if len(pieces) > 1 and not all(piece.outputs for piece in pieces):
            # What only changes its inputs belongs to what comes next.
            empty = next(place for place, piece in enumerate(pieces) if not piece.outputs)
            gone = min(empty, len(begins) - 1)
            return self.pieces([*begins[:gone], *begins[gone + 1 :]])
        return pieces

    def _find_first_uses(self, parameters: Mapping[torch.nn.Parameter, Node]) -> dict[torch.Tensor, int]:
        positions = {node: position for position, node in enumerate(self._points.nodes)}
        uses: dict[torch.Tensor, int] = {}
        for parameter, node in parameters.items():
            users = [positions[user] for user in node.users if self._is_differentiated(user)]
            if users:
                uses[parameter] = min(users)
        return uses

    def _is_differentiated(self, user: Node) -> bool:
        """Whether gradients flow through the operation; one without a result may have changed something."""
        if user.op == "output":
            return False
        return self._points.values[user] is None or self._points.needs_gradient(user)
