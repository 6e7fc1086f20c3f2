"""The order in which autograd's engine accumulates gradients, without running it.

The engine runs, of all nodes whose gradients have come, the one that was made last, and accumulates into leaves at
once. Its order in plain PyTorch is that in which stock DDP's reducer lays out its rebuilt buckets. It is found by a
run of the captured graph on fake tensors, which leaves autograd's nodes.

Limit: of four or more gradients that one node gives to leaves, the engine takes some earlier than others; here they
come as the node gives them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Node = Any


def arrival_order(
    results: Iterable[torch.Tensor], leaves: Mapping[torch.nn.Parameter, torch.Tensor]
) -> list[torch.nn.Parameter]:
    """The parameters whose gradients a backward from all ``results`` computes, in order.

    Args:
        leaves: what stood for each parameter in the run.
    """
    parameter_of = {
        get_gradient_edge(leaf).node: parameter for parameter, leaf in leaves.items() if leaf.requires_grad
    }
    roots = [get_gradient_edge(result).node for result in results if result.requires_grad]
    awaited = _count_edges(roots)
    ready: list[tuple[float, int, Node]] = []
    turn = itertools.count()

    def give(node: Node) -> None:
        awaited[node] -= 1
        if not awaited[node]:
            heapq.heappush(ready, (-_priority(node, node in parameter_of), next(turn), node))

    for root in roots:
        give(root)
    arrived = []
    while ready:
        *_, node = heapq.heappop(ready)
        if node in parameter_of:
            arrived.append(parameter_of[node])
            continue
        for following, _ in node.next_functions:
            if following is not None:
                give(following)
    return arrived


def _priority(node: Node, is_leaf: bool) -> float:
    return math.inf if is_leaf or not node.next_functions else node._sequence_nr()


def _count_edges(roots: Iterable[Node]) -> Counter[Node]:
    """How many gradients each node waits for. It also keeps the nodes' Python objects, which tell them apart."""
    waiting = list(roots)
    awaited = Counter(waiting)
    seen = set(waiting)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is None:
                continue
            awaited[following] += 1
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return awaited
