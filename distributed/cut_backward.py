"""Cuts a backward graph where gradients become ready.

A region computes what the gradients of its segment need and nothing else: work that only later segments need, or
only the gradients of the inputs, waits, so that gradients are complete as early as they can be. The regions together
compute every value once, in the order of the graph within a region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule, Node

from compile_core.errors import InternalError
from compile_core.ir.regions import build_region, graph_inputs, graph_results
from compile_core.ir.schedule import Schedule


def cut_backward(
    module: GraphModule, gradients: Mapping[str, int], segments: Sequence[Sequence[str]], factor: float
) -> Schedule:
    """The backward with a region for each segment.

    Args:
        module: the backward graph; results that are in ``gradients`` are stored, not returned.
        gradients: for every parameter of the segments, the position of its gradient among the results.
        segments: the parameters whose gradients are complete when the region ends, in the order of the regions.
        factor: by which gradients are multiplied when they are stored.

    Returns:
        A schedule with one region a segment, and one more if other results remain. Destinations are named after the
        parameters.
    """
    found = graph_results(module)
    regions = []
    placed: set[Node] = set()
    for names in segments:
        stored = {name: _result(found, gradients[name]) for name in names}
        nodes = _needed(stored.values(), placed)
        placed |= nodes
        regions.append((nodes, stored))
    # By position: an input may have the same value for its gradient as a parameter, as the terms of a sum do.
    taken = set(gradients.values())
    returned = [None if position in taken else node for position, node in enumerate(found)]
    rest = _needed((node for node in returned if node is not None), placed)
    if rest:
        regions.append((rest, {}))

    computes = []
    kept = {node for node in returned if node is not None}
    for position, (nodes, stored) in enumerate(regions):
        later = set(kept)
        for others, other_stored in regions[position + 1 :]:
            later.update(other_stored.values())
            later.update(source for node in others for source in node.all_input_nodes)
        ordered = [node for node in module.graph.nodes if node in nodes]
        results = [node for node in ordered if node in later]
        computes.append(build_region(f"backward_{position}", module, ordered, results, stored, factor))
    return Schedule(
        name="backward",
        inputs=tuple(node.name for node in graph_inputs(module)),
        computes=tuple(computes),
        outputs=tuple(None if node is None else node.name for node in returned),
    )


def _result(results: Sequence[Node | None], position: int) -> Node:
    node = results[position]
    if node is None:
        raise InternalError(f"result {position} of the backward is undefined and cannot be stored")
    return node


def _needed(results: Iterable[Node], placed: set[Node]) -> set[Node]:
    """What must be computed for these values and is not placed yet.

    The parts of a tuple go where the tuple goes: only tensors pass between regions.
    """
    found: set[Node] = set()
    frontier = list(results)
    while frontier:
        node = frontier.pop()
        if node in found or node in placed or node.op == "placeholder":
            continue
        found.add(node)
        frontier.extend(node.all_input_nodes)
        frontier.extend(user for user in node.users if user.target is operator.getitem)
    return found
