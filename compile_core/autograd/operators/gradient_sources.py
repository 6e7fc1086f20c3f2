"""Which of the gradients that arrive a value of a backward depends on.

Sources are a bit set. Of n results, bit k stands for a gradient that arrives at the k-th, and bit n + k for the engine
coming there, be it with nothing: custom functions get zeros then. Where it brings a gradient it comes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL
from gradsplit.compile_core.ir.bit_sets import is_within, members
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.torch_facts.dispatcher import is_random

Sources = int


def gradient_sources(graph: Graph, tangents: Sequence[str]) -> dict[Node, Sources]:
    """For each value, the tangents that define it: with none of them nothing is computed.

    Tangents are given by the names of their placeholders.
    """
    positions = {name: position for position, name in enumerate(tangents)}
    found: dict[Node, Sources] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = 1 << positions[node.name] if node.name in positions else 0
        elif node.target is JOINT_ARRIVAL and node.args[3:4] == (True,):
            found[node] = _any_of(found, node.args[1]) << len(tangents)  # type: ignore[arg-type]
        else:
            found[node] = _any_of(found, node.all_input_nodes)
            found[node] &= ~(found[node] >> len(tangents))
    return found


def element_sources(sources: Mapping[Node, Sources], count: int) -> dict[Node, Sources]:
    """For each value, the tangents without which its elements are as if nothing was computed, though it is defined.

    Args:
        sources: see ``gradient_sources``.
        count: of the tangents.
    """
    found: dict[Node, Sources] = {}
    for node, defined_by in sources.items():
        if node.op == "placeholder" or node.target is JOINT_ARRIVAL:
            is_nothing = node.args[2:3] == (True,)
            found[node] = found[node.all_input_nodes[0]] if is_nothing else defined_by
        else:
            found[node] = _any_of(found, node.all_input_nodes)
            found[node] &= ~(found[node] >> count)
    return found


def results_of(sources: Sources, count: int) -> Sources:
    """The positions of the results that these are of, as a bit set below ``count``."""
    return (sources | sources >> count) & ((1 << count) - 1)


def missing_sources(absent: Sources, idle: Sources, count: int) -> Sources:
    """What does not come: the gradients of these results, and the engine itself to those, both below ``count``."""
    return absent | idle << count


def tangent_groups(graph: Graph, tangents: Sequence[str]) -> tuple[Sources, ...]:
    """For each tangent, those with which it shares operations that read what is saved, directly or by way of others.

    Args:
        graph: a joint graph as it was traced; a rewrite makes one operation of several that had nothing in common.
    """
    sources = gradient_sources(graph, tangents)
    group_of = [1 << k for k in range(len(tangents))]
    saved: set[Node] = set()
    for node in graph.nodes:
        of = results_of(sources[node], len(tangents))
        reads_saved = not saved.isdisjoint(node.all_input_nodes)
        if not of:
            # Constants and sizes are not saved.
            if (reads_saved or node.op == "placeholder" or is_random(node)) and not is_number(node):
                saved.add(node)
        elif reads_saved and node.op != "output" and not is_within(of, group_of[of.bit_length() - 1]):
            merged = functools.reduce(operator.or_, (group_of[k] for k in members(of)))
            for k in members(merged):
                group_of[k] = merged
    return tuple(group_of)


def reading_tangents(graph: Graph, tangents: Sequence[str]) -> list[Sources]:
    """For each placeholder, the tangents whose gradients are computed from it, as positions."""
    sources = gradient_sources(graph, tangents)
    found: dict[Node, Sources] = {}
    for node in reversed(graph.nodes):
        # What depends on no tangent is read by all that read it, and so on.
        found[node] = results_of(sources[node], len(tangents)) or _any_of(found, node.users)
    return [found[node] for node in graph.nodes if node.op == "placeholder"]


def _any_of(found: Mapping[Node, Sources], values: Iterable[Node]) -> Sources:
    return functools.reduce(operator.or_, (found[value] for value in values), 0)


def inputs_that_matter(
    graph: Graph,
    tangents: Sequence[str],
    defined_by: Sequence[Sources],
    absent: Sources,
    unwanted: frozenset[int] = frozenset(),
) -> set[str]:
    """The placeholders that any wanted gradient is computed from which depends on more than the absent tangents.

    Args:
        defined_by: the sources of each gradient, also of one that is the same number for all tangents.
        absent: positions of tangents, to which the engine does not come, as a bit set.
        unwanted: positions of gradients.
    """

    def is_nothing(sources: Sources) -> bool:
        return bool(sources) and is_within(sources, missing_sources(absent, absent, len(tangents)))

    nothing = {node for node, sources in gradient_sources(graph, tangents).items() if is_nothing(sources)}
    (output,) = graph.find_nodes(op="output")
    gradients: Any = zip(output.args[0], defined_by, strict=True)
    results = [
        node
        for k, (node, sources) in enumerate(gradients)
        if node is not None and k not in unwanted and node not in nothing and not is_nothing(sources)
    ]
    return {node.name for node in ancestors(results, nothing) if node.op == "placeholder"}
