"""Cuts a backward graph where gradient buckets become ready.

A region computes what one bucket's gradients need and nothing else: work that only later buckets need, or
only the gradients of the inputs, waits, so that each all-reduce starts as early as its bucket can be
complete. The regions together compute every value once, in the order of the graph within a region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule, Node

from bucketing.bucket import BucketPlan
from compile_core.errors import InternalError
from compile_core.ir.regions import build_region, graph_inputs, graph_results
from compile_core.ir.schedule import Schedule, ScheduleStep, StartCollective, WaitCollective


def cut_backward(
    module: GraphModule, gradients: Mapping[str, int], plan: BucketPlan, factor: float
) -> Schedule:
    """The backward with each bucket's all-reduce started behind the region that completes it.

    Args:
        module: the backward graph; results that are in ``gradients`` are stored in buckets, not returned.
        gradients: for every parameter of the plan, the position of its gradient among the results.
        plan: the buckets, in the order in which their all-reduces start.
        factor: by which gradients are multiplied on their way into the buckets.

    Returns:
        A schedule with one region a bucket, one more if other results remain, and the waits last.
        Destinations are named after the parameters.
    """
    found = graph_results(module)
    regions = []
    placed: set[Node] = set()
    for bucket in plan.buckets:
        stored = {
            parameter.name: _result(found, gradients[parameter.name]) for parameter in bucket.parameters
        }
        nodes = _needed(stored.values(), placed)
        placed |= nodes
        regions.append((nodes, stored))
    # By position: an input may have the same value for its gradient as a parameter, as the terms of a sum do.
    into_buckets = set(gradients.values())
    returned = [None if position in into_buckets else node for position, node in enumerate(found)]
    rest = _needed((node for node in returned if node is not None), placed)
    if rest:
        regions.append((rest, {}))

    steps: list[ScheduleStep] = []
    kept = {node for node in returned if node is not None}
    for position, (nodes, stored) in enumerate(regions):
        later = set(kept)
        for others, other_stored in regions[position + 1 :]:
            later.update(other_stored.values())
            later.update(source for node in others for source in node.all_input_nodes)
        ordered = [node for node in module.graph.nodes if node in nodes]
        results = [node for node in ordered if node in later]
        steps.append(build_region(f"backward_{position}", module, ordered, results, stored, factor))
        if stored:
            steps.append(StartCollective(position))
    steps += [WaitCollective(bucket.index) for bucket in plan.buckets]
    return Schedule(
        name="backward",
        inputs=tuple(node.name for node in graph_inputs(module)),
        steps=tuple(steps),
        outputs=tuple(None if node is None else node.name for node in returned),
    )


def _result(results: Sequence[Node | None], position: int) -> Node:
    node = results[position]
    if node is None:
        raise InternalError(f"result {position} of the backward is undefined and cannot go into a bucket")
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
