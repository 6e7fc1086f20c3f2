"""Cuts a captured graph around the calls that cannot be traced, so that only these run with torch's own kernels.

An operator of a library may have a backward in Python that looks at data. Which call it is, the failure of a trace does
not say; so it is searched for: the shortest beginning of the graph that cannot be traced ends with it. What else the
graph calls of the same kind, once a layer, is set apart with it.

Where a piece raises, the call is made again as plain Python, and draws of earlier pieces are given back; but not a call
that changes its inputs. Limit: such a graph is not cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.cut_points import CutPoints, find_cut_points
from gradsplit.compile_core.autograd.captured_graphs.pieces import Piece, cut_graph
from gradsplit.compile_core.errors import Unsupported

_ITEM = ("call_function", operator.getitem)


def cut_around(
    module: GraphModule, examples: Sequence[Any], is_traceable: Callable[[GraphModule], bool]
) -> list[Piece]:
    """The pieces of a graph in order, where what is not traceable stands alone; none if that cannot be, or if all is.

    Args:
        examples: a fake tensor or a number for each placeholder.
        is_traceable: whether a piece is, whose placeholders have examples in ``example_value``.
    """
    if is_traceable(module):
        return []
    try:
        return _pieces(module, find_cut_points(module, examples), examples, is_traceable)
    except Unsupported:
        return []


def _pieces(
    module: GraphModule,
    points: CutPoints,
    examples: Sequence[Any],
    is_traceable: Callable[[GraphModule], bool],
) -> list[Piece]:
    def cut(begins: Sequence[int]) -> list[Piece]:
        place_of = points.places(begins)
        return cut_graph(module, place_of, points.examples(place_of, examples))

    if any(node.op == "placeholder" for node in points.changed_at):
        return []
    count = len(points.nodes)
    places = [position for position in range(1, count) if points.allowed[position]]
    if not places:
        return []
    # The first place before which something is not traceable.
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if is_traceable(cut([places[middle]])[0].module):
            low = middle + 1
        else:
            high = middle
    ends = [*places, count]
    begin = ends[low - 1] if low else 0
    kinds = {_kind(node) for node in points.nodes[begin : ends[low]]} - {_ITEM}
    begins: set[int] = set()
    for before, after in zip([0, *places], ends, strict=True):
        if not kinds.isdisjoint(map(_kind, points.nodes[before:after])):
            begins |= {before, after}
    begins -= {0, count}
    pieces = cut(sorted(begins)) if begins else []
    # One piece is the graph itself: gradients that it asks for are of one piece with what they are of.
    return pieces if len(pieces) > 1 else []


def _kind(node: Node) -> tuple[str, Any]:
    return node.op, node.target
