"""A forward that begins before all of its inputs have their values.

Data parallelism sends a module's buffers to all processes before each forward. In training most of them are running
statistics, which a forward brings up to date and does not read otherwise. So the forward is cut in two: what does not
depend on such inputs, and the *updates*, which do and run when the values are there. What updates read of the first
part, as the mean of a batch, passes between the two as results; steps that only they need and that make nothing smaller
are theirs.

Not so where more than new values of inputs depends on late ones, or where so much would pass that it matters how long
it is kept. Then the values are needed before the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_core.autograd.bound_graphs.returned_draws import Program
from compile_core.autograd.bound_graphs.updated_inputs import store_values
from compile_core.ir.graphs import PartitionedGraph
from compile_core.ir.late_inputs import LateInputs
from compile_core.ir.lazy_modules import lazy_module
from compile_core.ir.random_operators import is_random
from compile_core.ir.regions import build_region, graph_inputs, graph_results
from compile_core.ir.schedule import Schedule

# How many bytes may pass for each byte that is brought up to date.
_MOST_PASSED = 4


@dataclass(frozen=True)
class SplitForward:
    """
    Attributes:
        first: the graph without the updates: their results are ``None``, and behind its outputs it returns what they
            read, which counts as outputs.
        updates: takes primals and what is passed, returns new values of primals; ``None`` if there are none.
        given: the positions of the primals that it takes.
        passed: how many results pass.
        changed: the positions of the primals whose new values it returns.
        outputs: the positions of these values among the outputs.
    """

    first: PartitionedGraph
    updates: Schedule | None = None
    given: tuple[int, ...] = ()
    passed: int = 0
    changed: tuple[int, ...] = ()
    outputs: frozenset[int] = frozenset()


def split_forward(
    graph: PartitionedGraph, late: frozenset[int], updated: Mapping[int, int]
) -> SplitForward | None:
    """The forward in two, if it is one that may begin before the primals ``late`` have their values.

    Args:
        updated: by position of an output, the primal of which it is the new value; see ``updated_inputs``.
    """
    nodes, results = [*graph.forward.graph.nodes], graph_results(graph.forward)
    primals = graph_inputs(graph.forward)
    moved = _dependent(nodes, {primals[position] for position in late})
    new_values = {
        output: node for output in updated if (node := results[output]) is not None and node in moved
    }
    if any(node in moved and place not in new_values for place, node in enumerate(results)):
        return None
    if any(position in late and output not in new_values for output, position in updated.items()):
        return None  # the late value would take the place of the new one
    if not new_values:
        return SplitForward(graph)
    moved |= _only_for(moved, nodes, results)
    returned = [*dict.fromkeys(new_values.values())]
    region = build_region("updates", graph.forward, [node for node in nodes if node in moved], returned)
    names = {*region.inputs}
    given = [position for position, node in enumerate(primals) if node.name in names]
    passed = [node for node in nodes if node.name in names and node.op != "placeholder"]
    if any(_bytes_of(node) is None for node in passed):
        return None
    changed = tuple(updated[output] for output in new_values)
    if _sum_bytes(passed) > _MOST_PASSED * _sum_bytes([primals[position] for position in changed]):
        return None
    replaced = {
        node.name: primals[updated[output]].name
        for output, node in new_values.items()
        if results.count(node) == 1 and primals[updated[output]].name in names
    }
    return SplitForward(
        first=_without(graph, moved, passed),
        # Primals stand before what is computed, in the region's inputs as in the graph.
        updates=Schedule(
            "updates",
            region.inputs,
            (replace(region, replaced=replaced),),
            tuple(node.name for node in new_values.values()),
        ),
        given=tuple(given),
        passed=len(passed),
        changed=changed,
        outputs=frozenset(new_values),
    )


def with_late_updates(program: Program, split: SplitForward, updates: Program, late: LateInputs) -> Program:
    """The program of the whole forward: that of ``split.first``, and the updates behind it."""
    end = split.first.num_outputs
    begin = end - split.passed

    def run(arguments: list[torch.Tensor]) -> Sequence[Any]:
        given = [arguments[position] for position in split.given]
        changed = [arguments[position] for position in split.changed]
        try:
            results = program(arguments)
        finally:
            late.await_values()  # of a program that raises, too, since the call is made again as plain Python
        store_values(changed, updates([*given, *results[begin:end]]))
        return [*results[:begin], *results[end:]]

    return run


def _dependent(nodes: Sequence[Node], roots: set[Node]) -> set[Node]:
    """What depends on any of the roots, without these."""
    found: set[Node] = set()
    for node in nodes:
        if node.op == "call_function" and any(
            source in roots or source in found for source in node.all_input_nodes
        ):
            found.add(node)
    return found


def _only_for(moved: set[Node], nodes: Sequence[Node], results: Sequence[Node | None]) -> set[Node]:
    """Other nodes that nothing else needs, and that are no smaller than what they are computed from."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if node.op != "call_function" or node in moved or node in results or is_random(node):
            continue
        if not node.users or not all(user in moved or user in found for user in node.users):
            continue
        size = _bytes_of(node)
        sources = [_bytes_of(source) for source in node.all_input_nodes]
        if size is not None and all(given is not None and given <= size for given in sources):
            found.add(node)
    return found


def _without(graph: PartitionedGraph, moved: set[Node], passed: Sequence[Node]) -> PartitionedGraph:
    """The partition whose forward leaves nodes out and returns others behind its outputs."""
    results, end = graph_results(graph.forward), graph.num_outputs
    forward = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.forward.graph.nodes:
        if node.op != "output" and node not in moved:
            copies[node] = forward.node_copy(node, copies.__getitem__)
    returned = [*results[:end], *passed, *results[end:]]
    forward.output(tuple(None if node is None or node in moved else copies[node] for node in returned))
    return replace(graph, forward=lazy_module(graph.forward, forward), num_outputs=end + len(passed))


def _bytes_of(node: Node) -> int | None:
    """``None`` for what is no tensor of a known size."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.numel() * value.element_size()


def _sum_bytes(nodes: Sequence[Node]) -> int:
    return sum(_bytes_of(node) or 0 for node in nodes)
