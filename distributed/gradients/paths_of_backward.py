"""Which results and parameters the running backward would reach in plain PyTorch.

A compiled graph is one function to autograd's engine: from any of its results the engine reaches all of its inputs,
with undefined gradients if need be. Plain PyTorch reaches only those that the result was computed from. The paths are
found by a walk through autograd's graph where a gradient is undefined, hence rarely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from gradsplit.compile_core.autograd.bound_graphs.compiled_call import edges_behind
from gradsplit.compile_core.torch_facts.autograd_engine import current_graph_task_id, will_engine_execute_node

Roots = Sequence[torch.Tensor | GradientEdge]
# Of the backwards that run, by their start; and whether each is for all leaves.
_roots: dict[object, Roots] = {}
_whole: dict[object, bool] = {}
# What was found, by the engine's number of the backward.
_reached: dict[int, dict[Any, set[int]]] = {}


@contextmanager
def paths_begin_at(roots: Roots, is_whole: bool = True) -> Iterator[None]:
    """A backward runs from here, for all leaves or for the requested ones."""
    start = object()
    _roots[start], _whole[start] = roots, is_whole
    try:
        yield
    finally:
        del _roots[start], _whole[start]
        _reached.clear()


def backward_is_whole() -> bool:
    """Whether the backward that runs is for all leaves."""
    return all(_whole.values())


def reached_results(node: Any) -> set[int]:
    """The results of a node of autograd's graph to which the backward that runs has a path. A leaf has one."""
    number = current_graph_task_id()
    if number not in _reached:
        _reached[number] = _find_reached()
    return _reached[number].get(node, set())


def reached_by_some(node: Any, results_of: Mapping[str, Collection[int]]) -> frozenset[str]:
    """Those of some names for which the backward that runs has a path to one of the results of the node."""
    reached = reached_results(node)
    return frozenset(name for name, results in results_of.items() if not reached.isdisjoint(results))


def _find_reached() -> dict[Any, set[int]]:
    # Whether the engine runs a node at which a backward begins is not to be found out from it.
    pending = [_edge_of(root) for roots in [*_roots.values()] for root in roots]
    seen: set[tuple[Any, int]] = set()
    while pending:
        edge = pending.pop()
        if edge[0] is not None and edge not in seen:
            seen.add(edge)
            pending += [
                following
                for following in edges_behind(*edge)
                if following[0] is not None and will_engine_execute_node(following[0])
            ]
    reached: dict[Any, set[int]] = {}
    for node, position in seen:
        reached.setdefault(node, set()).add(position)
    return reached


def _edge_of(root: torch.Tensor | GradientEdge) -> tuple[Any, int]:
    return (root.node if isinstance(root, GradientEdge) else root.grad_fn), root.output_nr
