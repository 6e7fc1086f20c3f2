"""Cuts a backward graph into regions, after each of which some gradients are complete.

What runs in which region, and in which order, is planned before (``plan_segments``). Between regions pass the values
that later ones read; together they compute every value once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.regions import build_region, graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Schedule


@dataclass(frozen=True)
class Segment:
    """A part of the backward, compiled as one region.

    Attributes:
        nodes: what it computes, in the order in which it runs. The parts of a tuple are where the tuple is: only
            tensors pass between regions.
        gradients: names of the parameters whose gradients are complete after it, in the order in which they are.
    """

    nodes: tuple[Node, ...]
    gradients: tuple[str, ...]


def cut_backward(
    module: GraphModule,
    gradients: Mapping[str, int],
    segments: Sequence[Segment],
    factor: float,
    strides: Mapping[str, tuple[int, ...]],
) -> Schedule:
    """The backward with a region for each segment.

    Args:
        module: the backward graph; results that are in ``gradients`` are stored, not returned.
        gradients: for every parameter of the segments, the position of its gradient among the results.
        segments: in the order of the regions, with all nodes that compute.
        factor: by which gradients are multiplied when they are stored.
        strides: of places that are not contiguous, by parameter.

    Returns:
        A schedule whose destinations are named after the parameters.
    """
    results = graph_results(module)
    # By position: an input may have the same value for its gradient as a parameter, as the terms of a sum do.
    stored = set(gradients.values())
    returned = [None if position in stored else node for position, node in enumerate(results)]
    later = {node for node in returned if node is not None}
    computes = []
    for number, segment in reversed(list(enumerate(segments))):
        stored = {name: _result(results, gradients[name]) for name in segment.gradients}
        passed = [node for node in segment.nodes if node in later]
        name = f"backward_{number}"
        computes.append(build_region(name, module, segment.nodes, passed, stored, factor, strides))
        later.update(stored.values())
        later.update(source for node in segment.nodes for source in node.all_input_nodes)
    return Schedule(
        name="backward",
        inputs=tuple(node.name for node in graph_inputs(module)),
        computes=tuple(reversed(computes)),
        outputs=tuple(None if node is None else node.name for node in returned),
        stored=dict(gradients),
    )


def _result(results: Sequence[Node | None], position: int) -> Node:
    node = results[position]
    if node is None:
        raise InternalError(f"result {position} of the backward is undefined and cannot be stored")
    return node
