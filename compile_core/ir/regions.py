"""Builds compute regions from parts of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module


def graph_inputs(module: GraphModule) -> list[Node]:
    """The placeholders in order."""
    return list(module.graph.find_nodes(op="placeholder"))


def graph_results(module: GraphModule) -> list[Node | None]:
    """What the output node returns, a flat list."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def build_region(
    name: str,
    module: GraphModule,
    nodes: Sequence[Node],
    results: Sequence[Node],
    destinations: Mapping[str, Node] | None = None,
    factor: float = 1.0,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> Compute:
    """The region that computes ``nodes``, which lie in graph order.

    Args:
        name: of the region.
        module: the graph that the nodes are from; its attributes are shared.
        nodes: computed here. Whatever else they read becomes an input of the region.
        results: those of the nodes that are known outside under their own names.
        destinations: name of a persistent buffer -> the value to store there, computed here or an input. The
            region's result for it is named after the buffer, with the suffix ``.stored``.
        factor: by which every value is multiplied on its way to its destination.
        strides: of the buffers that are not contiguous, by their names.
    """
    destinations = destinations or {}
    # A parameter may bear the name of a node; no node has a dot in its name.
    stored_names = {destination: f"{destination}.stored" for destination in destinations}
    here = set(nodes)
    read = {source for node in nodes for source in node.all_input_nodes} | {*destinations.values()}
    graph = Graph()
    copies: dict[Node, Node] = {}
    # In the graph's order: a region that is all of a schedule takes what that takes.
    inputs = sorted(read - here)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = [copies[node] for node in results]
    for node in destinations.values():
        stored = copies[node]
        if factor != 1.0:
            stored = graph.call_function(torch.ops.aten.mul.Tensor, (stored, factor))
            stored.meta = {"val": node.meta["val"]}
        returned.append(stored)
    graph.output(tuple(returned))
    return Compute(
        name=name,
        module=lazy_module(module, graph),
        inputs=tuple(node.name for node in inputs),
        outputs=(*(node.name for node in results), *stored_names.values()),
        destinations={stored_names[destination]: destination for destination in destinations},
        strides={
            stored_names[name]: found for name, found in (strides or {}).items() if name in destinations
        },
    )


def whole_schedule(
    name: str, module: GraphModule, replaced: Mapping[int, int] | None = None, num_visible: int | None = None
) -> Schedule:
    """The schedule of one process: the whole graph is one region.

    Args:
        replaced: see ``Compute.replaced``, by position of the result -> position of the input.
        num_visible: how many of the first results somebody may see, if not all; see ``Compute.kept``.
    """
    results = graph_results(module)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    computed = list(dict.fromkeys(node for node in results if node is not None and node.op != "placeholder"))
    inputs = tuple(node.name for node in graph_inputs(module))
    region = build_region(name, module, nodes, computed)
    returned, taken = Counter(results), set(region.inputs)
    updates = {
        node.name: inputs[given]
        for position, given in (replaced or {}).items()
        if (node := results[position]) is not None
        and node.op != "placeholder"
        and returned[node] == 1
        and inputs[given] in taken
    }
    visible = set(results[:num_visible])
    kept = frozenset(node.name for node in computed if node not in visible)
    return Schedule(
        name=name,
        inputs=inputs,
        computes=(replace(region, replaced=updates, kept=kept),),
        outputs=tuple(None if node is None else node.name for node in results),
    )
