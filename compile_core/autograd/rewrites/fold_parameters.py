"""Last of the passes before the partition: what is computed of parameters alone leaves the graph (``freezing``).

Without gradients a parameter is the same in each call: its cast under autocast, the norm of a weight, a batch norm's
scale, weights laid out as kernels like them are the same, too. Such expressions become a graph of their own, which is
run once (``bound_graphs.folded_graph``), and their values further inputs.

Only what the rest reads is kept, no view of it, and nothing that is larger than all that it is computed from: a table
that is expanded for a batch is cheaper to expand than to read. What the graph returns is computed in each call: it is
the caller's, who may change it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from gradsplit.compile_core.autograd.operators.costs import result_bytes
from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors, memory_of
from gradsplit.compile_core.autograd.operators.kinds import packet
from gradsplit.compile_core.ir.graphs import FoldedValues, JointGraph
from gradsplit.compile_core.ir.packed_weights import PACKINGS
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module

aten = torch.ops.aten

# Larger than what it is computed from, yet too small to matter.
_SMALL_BYTES = 1 << 16
_UNDEFINED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


def fold_parameters(joint: JointGraph, held: Set[int]) -> JointGraph:
    """The joint graph that takes such values as its last primals; changes its module.

    Args:
        joint: the graph; one with gradients stays as it is.
        held: positions of the primals that stay as they are between calls.
    """
    graph = joint.module.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    folded = [] if joint.tangents else _folded_values(graph, parameters_read(joint, held))
    if not folded:
        return joint
    needed = ancestors(folded)
    read = [k for k, name in enumerate(joint.primals) if placeholders[name] in needed]
    module = _graph_of(joint.module, needed, [placeholders[joint.primals[k]] for k in read], folded)
    names = []
    for number, value in enumerate(folded):
        with graph.inserting_after(placeholders[[*joint.primals, *names][-1]]):
            given = placeholders[name] = graph.placeholder(name := f"folded_{number}")
        given.meta["val"] = value.meta["val"]
        names.append(given.name)
        value.replace_all_uses_with(given)
    for node in reversed([node for node in graph.nodes if node in needed]):
        if node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    joint.module.recompile()
    return replace(joint, primals=(*joint.primals, *names), folded=FoldedValues(module, tuple(read)))


def parameters_read(joint: JointGraph, held: Set[int]) -> dict[Node, frozenset[Node]]:
    """The values that are the same in each call, with the held primals that they are computed from."""
    changed = {mutation.input for mutation in joint.signature.mutated}
    names = {joint.primals[position] for position in held - changed}
    sources: dict[Node, frozenset[Node]] = {}
    for node in joint.module.graph.nodes:
        if node.name in names:
            sources[node] = frozenset([node])
        elif node.op == "call_function" and _is_function(node) and sources.keys() >= {*node.all_input_nodes}:
            sources[node] = frozenset().union(*(sources[read] for read in node.all_input_nodes))
    return sources


def is_small_enough(node: Node, sources: Mapping[Node, frozenset[Node]]) -> bool:
    """Whether it is worth its memory to keep such a value."""
    return result_bytes(node) <= max(_SMALL_BYTES, sum(map(result_bytes, sources[node])))


def _folded_values(graph: Graph, sources: Mapping[Node, frozenset[Node]]) -> list[Node]:
    """The values to keep, in the graph's order."""
    (output,) = graph.find_nodes(op="output")
    returned = {memory_of(node) for node in output.all_input_nodes}
    chosen: set[Node] = set()
    pending = [read for node in graph.nodes if node not in sources for read in node.all_input_nodes]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or node not in sources or node.op == "placeholder" or not sources[node]:
            continue
        seen.add(node)
        is_whole = isinstance(node.meta["val"], torch.Tensor) and _has_own_memory(node)
        if is_whole and memory_of(node) not in returned and is_small_enough(node, sources):
            chosen.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return [node for node in graph.nodes if node in chosen]


def _is_function(node: Node) -> bool:
    """Whether it computes the same whenever it runs, in memory of its own or in that of what it reads."""
    if node.target is operator.getitem:
        return True
    if node.target in PACKINGS:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return not (node.target._schema.is_mutable or packet(node) in _UNDEFINED or is_random(node))


def _has_own_memory(node: Node) -> bool:
    base = memory_of(node)
    is_one_of_several = node.target is operator.getitem and base is node.args[0]
    return base is node or (is_one_of_several and not isinstance(base.meta["val"], torch.Tensor))


def _graph_of(
    module: GraphModule, needed: Set[Node], inputs: Sequence[Node], values: Sequence[Node]
) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[value] for value in values))
    return lazy_module(module, graph)
