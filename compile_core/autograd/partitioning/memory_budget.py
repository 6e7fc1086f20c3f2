"""Saves less than what is cheapest in time, down to a budget: time for memory.

The values that the cut may not recompute are the items of a knapsack: its room is the budget, an item's weight the
bytes it keeps alive, its worth the time that computing it again takes. It is filled greedily by worth a byte. What
saving one value less really saves only the cut knows (its inputs may have to be saved instead), so the number of items
that are given up is found by bisection over cuts.

Limits: random numbers are never drawn again, so their results stay saved whatever the budget, and so does what the
program's checkpoints order to save; times are estimated from floating-point operations and bytes, not measured.
"""

from __future__ import annotations

import math

from torch.fx import Node

from gradsplit.compile_core.autograd.operators.costs import moved_bytes, operations_of
from gradsplit.compile_core.autograd.partitioning.min_cut import CutProblem, bytes_of, choose_saved, is_pinned
from gradsplit.compile_core.torch_facts.dispatcher import is_random

# Operations that a processor does in the time of reading one byte; between a CPU's ten and a GPU's two hundred.
_OPERATIONS_A_BYTE = 50


def choose_within_budget(problem: CutProblem, budget: float) -> list[Node]:
    """The values to save, in graph order, of at most ``budget`` times the bytes that are saved at a budget of 1.

    Where no choice is that small (see the limits), the smallest.
    """
    cheapest = choose_saved(problem)
    if budget >= 1:
        return cheapest
    limit = budget * _saved_bytes(problem, cheapest)
    given_up = _by_worth(problem, cheapest)
    fewest, most = 0, len(given_up)
    chosen = choose_saved(problem, frozenset(given_up))
    while fewest < most:
        count = (fewest + most) // 2
        saved = choose_saved(problem, frozenset(given_up[:count]))
        if _saved_bytes(problem, saved) <= limit:
            chosen, most = saved, count
        else:
            fewest = count + 1
    return chosen


def _saved_bytes(problem: CutProblem, saved: list[Node]) -> int:
    return sum(bytes_of(node) for node in saved if problem.is_computed(node))


def _by_worth(problem: CutProblem, saved: list[Node]) -> list[Node]:
    """What may be computed again at a price, the cheapest a byte first."""
    needed = problem.needed()
    primals = set(problem.primals)
    kept = set(saved)
    worth: dict[Node, float] = {}
    for node in problem.graph.nodes:
        if node not in needed or node in primals or node in problem.only_backward or is_random(node):
            continue
        if node not in problem.orders and is_pinned(problem, node, needed):
            freed = sum(bytes_of(value) for value in (node, *node.users) if value in kept)
            worth[node] = _estimated_cost(node) / freed if freed else math.inf
    return sorted(worth, key=worth.__getitem__)


def _estimated_cost(node: Node) -> float:
    """The time of an operator, in bytes read or written."""
    return moved_bytes(node) + operations_of(node) / _OPERATIONS_A_BYTE
