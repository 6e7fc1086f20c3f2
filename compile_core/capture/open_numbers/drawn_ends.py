"""What a program makes of a number that torch draws evenly between two ends, as far as it keeps their order.

``torch.rand([]) < 0.0`` is false whatever is drawn. An operation that keeps order, or turns it, gives for all that lies
between two numbers what lies between its results for these, rounded as it rounds. So steps are run for both ends, and a
decision that is the same for both is no decision. The draw itself stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.capture.values.view_copies import memory_of, nodes_in

Ends = tuple[torch.Tensor, torch.Tensor]

_MOST_ELEMENTS = 256
_KEEPING = frozenset(
    ["item", "float", "double", "to", "clone", "detach", "getitem", "neg", "sqrt", "truediv"]
)
_KEEPING_EITHER = frozenset(["add", "sub", "mul", "iadd", "isub", "imul", "add_", "sub_", "mul_"])
_COMPARING = frozenset(["lt", "le", "gt", "ge"])
_OF_TRUTHS = frozenset(["and_", "or_", "invert"])


def ends_of_draw(node: Node) -> Ends | None:
    """The least and the greatest that may be drawn; None of what is no draw. ``uniform_`` gives a new tensor what it
    holds if nothing else was done with it before."""
    example, fill = node.meta["example_value"], next(iter(node.users), node)
    between: tuple[Any, ...] = (0.0, 1.0)
    if _is_fill(fill, node) and _is_new(node):
        between = (*fill.args[1:], *between[len(fill.args) - 1 :])
    elif node.target not in (torch.rand, torch.rand_like) or node.kwargs.get("out") is not None:
        return None
    plain = all(type(size) is int for size in example.shape) and example.dtype.is_floating_point
    if not plain or example.numel() > _MOST_ELEMENTS or any(isinstance(end, Node) for end in between):
        return None
    # Of the steps from nought to one the last is never drawn; another end may be, by rounding.
    last = 1 - torch.finfo(example.dtype).eps / 2 if between == (0, 1) else between[1]
    low, high = (
        torch.full(example.shape, end, dtype=example.dtype, device="cpu") for end in (between[0], last)
    )
    return low, high


def fills(node: Node, draws: Iterable[Node]) -> bool:
    """Whether this is what makes one of these a draw."""
    return any(node is next(iter(draw.users), None) and _is_fill(node, draw) for draw in draws)


def _is_fill(node: Node, filled: Node) -> bool:
    return node.target == "uniform_" and not any(node.kwargs.values()) and node.args[0] is filled


def _is_new(node: Node) -> bool:
    """Whether it made its memory."""
    return node.op != "placeholder" and all(
        place_of(given) != place_of(node) for given in node.all_input_nodes
    )


def keep_order(steps: Sequence[Node], draws: Iterable[Node]) -> bool:
    """Whether each step with what was drawn keeps its order, or turns it: one with two such numbers need not."""
    drawn = set(map(place_of, draws))
    for step in steps:
        operands = nodes_in((step.args, step.kwargs))
        given = [operand for operand in operands if place_of(operand) in drawn]
        if given and (len(given) > 1 or not _keeps_order(step, given[0])):
            return False
        if given:
            drawn.add(place_of(step))
    return True


def _keeps_order(step: Node, given: Node) -> bool:
    name = step.target if isinstance(step.target, str) else step.target.__name__
    if name in _COMPARING:
        return True
    if is_truth(step):
        return is_truth(given) and name in _OF_TRUTHS | {"item", "clone", "detach"}
    if not _is_float(step):
        return False
    return name in _KEEPING_EITHER or (name in _KEEPING and step.args[0] is given)


def is_truth(node: Node) -> bool:
    """Whether it is true or false: of other numbers nought may lie between the ends."""
    example = node.meta["example_value"]
    return example.dtype is torch.bool if isinstance(example, torch.Tensor) else type(example) is bool


def _is_float(node: Node) -> bool:
    example = node.meta["example_value"]
    return example.dtype.is_floating_point if isinstance(example, torch.Tensor) else type(example) is float


def place_of(node: Node) -> Any:
    """What steps have in common that change a number in place, or look at it."""
    return memory_of(node) if isinstance(node.meta["example_value"], torch.Tensor) else node
