"""What checkpoints order the partition to save and to compute again.

As in eager, a region's inputs are saved and nothing inside it, but for what a policy says:

- ``MUST_SAVE`` is never computed again, however cheap; ``MUST_RECOMPUTE`` and ``PREFER_RECOMPUTE`` are never saved,
  however dear; ``PREFER_SAVE`` leaves the choice to the minimum cut, which saves what is dear.
- A policy speaks of the program's operators. Of one that was decomposed only the result can be saved.
- What leaves a region belongs to its reader outside. It is not computed again, or a chain of checkpoints would be
  computed again from its very beginning to save the inputs of all but the first.
- What only the backward computes, from what may not be saved, may not be saved either.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Mapping, Set

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from gradsplit.compile_core.autograd.operators.region_marks import RegionMark, mark_of
from gradsplit.compile_core.torch_facts.dispatcher import is_random


class Order(enum.Enum):
    """What must be done about a value that the backward needs."""

    SAVE = enum.auto()
    RECOMPUTE = enum.auto()


def find_orders(graph: Graph, in_forward: Set[Node], only_backward: Set[Node]) -> Mapping[Node, Order]:
    """The orders about the values of a joint graph; the cut is free to choose for those without one.

    Args:
        graph: a joint graph whose operators carry the marks of regions.
        in_forward: what the forward's outputs are computed from.
        only_backward: what depends on a tangent.
    """
    orders: dict[Node, Order] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in only_backward or _is_random(node):
            continue
        mark = mark_of(node)
        if node not in in_forward:
            order = _unless_saved(orders.get(source) for source in node.all_input_nodes)
        elif mark is not None:
            readers = [mark_of(user) for user in node.users if user in in_forward and user.op != "output"]
            order = _order_of(mark, readers)
        else:
            order = None
        if order is not None:
            orders[node] = order
    return orders


def _order_of(mark: RegionMark, readers: Iterable[RegionMark | None]) -> Order | None:
    readers = list(readers)
    outside = [reader for reader in readers if reader is None or reader.region != mark.region]
    must_recompute = mark.policy is CheckpointPolicy.MUST_RECOMPUTE
    if any(reader is not None for reader in outside) or (outside and not must_recompute):
        return Order.SAVE
    if mark.policy is CheckpointPolicy.PREFER_SAVE:
        return None
    is_result = not readers or any(reader is None or reader.operator != mark.operator for reader in readers)
    if mark.policy is CheckpointPolicy.MUST_SAVE and is_result:
        return Order.SAVE
    return Order.RECOMPUTE


def _unless_saved(orders: Iterable[Order | None]) -> Order | None:
    return Order.RECOMPUTE if Order.RECOMPUTE in orders else None


def _is_random(node: Node) -> bool:
    """Whether the value is a random operator's, which is saved wherever it lies."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and is_random(source)
