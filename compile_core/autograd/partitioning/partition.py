"""Cuts a joint graph into a forward and a backward, between which the chosen values are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.gradient_sources import Sources, reading_tangents
from gradsplit.compile_core.autograd.operators.graph_nodes import (
    ancestors,
    copy_after_sources,
    descendants,
    is_of_backward,
    memory_of,
)
from gradsplit.compile_core.autograd.operators.kinds import is_view
from gradsplit.compile_core.autograd.operators.region_marks import mark_of
from gradsplit.compile_core.autograd.partitioning.convolution_inputs import make_gradients_apart, write_again
from gradsplit.compile_core.autograd.partitioning.memory_budget import choose_within_budget
from gradsplit.compile_core.autograd.partitioning.min_cut import CutProblem, bytes_of
from gradsplit.compile_core.autograd.partitioning.own_backwards import recompute_for_own_backwards
from gradsplit.compile_core.autograd.partitioning.recompute_orders import find_orders
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.data_checks import CHECK
from gradsplit.compile_core.ir.graphs import JointGraph, PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.torch_facts.dispatcher import acts, is_random
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module


def partition(joint: JointGraph, activation_memory_budget: float = 1.0) -> PartitionedGraph:
    """The two programs of a joint graph; an inference graph has no backward.

    Args:
        joint: the graph.
        activation_memory_budget: the share of the bytes that are cheapest in time which may be saved.
    """
    if not joint.tangents:
        module = recompute_for_own_backwards(joint.module, activation_memory_budget)
        return PartitionedGraph(module, None, joint.num_outputs, (), 0, joint.signature)
    nodes = {node.name: node for node in joint.module.graph.nodes}
    primals = [nodes[name] for name in joint.primals]
    tangents = [nodes[name] for name in joint.tangents]
    results = _results(joint.module.graph)
    outputs, gradients = results[: joint.num_outputs], results[joint.num_outputs :]

    effects = [node for node in joint.module.graph.nodes if acts(node)]
    # What is assumed of data is checked before anything is changed.
    late = [node for node in effects if is_of_backward(node) and node.target is not CHECK]
    only_backward = descendants([*tangents, *late])
    for output in outputs:
        if output in only_backward:
            raise InternalError(f"forward output {output} depends on a tangent")
    changed = {primals[mutation.input] for mutation in joint.signature.mutated}
    in_forward = ancestors(node for node in outputs if node is not None)
    orders = find_orders(joint.module.graph, in_forward, only_backward)
    tensors = [node for node in primals if isinstance(node.meta["val"], torch.Tensor)]
    own = joint.num_outputs - len(joint.signature.mutated) - joint.signature.open_sizes
    all_tangents = (1 << len(joint.signature.tangents)) - 1
    computed_results = (outputs[k] for k in range(own) if joint.unnoticed_outputs.get(k) != all_tangents)
    noticed = {node for node in computed_results if node is not None and node.op != "placeholder"}
    problem = CutProblem(
        joint.module.graph, tensors, changed, in_forward, only_backward, gradients, orders, noticed
    )
    rewritten = write_again(problem, choose_within_budget(problem, activation_memory_budget))
    saved = rewritten.saved
    computed = [node for node in saved if problem.is_computed(node) or node in rewritten.copied]
    numbers = _needed_numbers(joint.module.graph, saved, gradients, only_backward)
    forward = _extract(
        joint.module,
        {node: node.name for node in primals},
        [*outputs, *computed, *(node for node in numbers if node.op != "placeholder")],
        effects=[node for node in effects if node not in only_backward],
        at_once={node for node in joint.module.graph.nodes if node not in in_forward and not is_random(node)},
    )
    names = {node: node.name for node in [*saved, *numbers]}
    copied = _copy_saved(
        forward, [node for node in saved if memory_of(node) in changed or node in rewritten.copied]
    )
    names |= {node: copy.name for node, copy in copied.items()}
    backward = _extract(
        joint.module,
        names | {node: node.name for node in tangents},
        gradients,
        effects=[node for node in effects if node in only_backward],
        on_demand=in_forward,
    )
    _read_copies(backward, [*copied.values()])
    make_gradients_apart(
        backward,
        {node.name: names.get(alike, alike.name) for node, alike in rewritten.convolutions.items()},
    )
    return PartitionedGraph(
        forward=forward,
        backward=backward,
        num_outputs=joint.num_outputs,
        saved=tuple(names.values()),
        saved_bytes=sum(bytes_of(node) for node in computed),
        signature=joint.signature,
        unnoticed=_find_unnoticed(joint, backward, [*names], changed),
    )


def _find_unnoticed(
    joint: JointGraph, backward: GraphModule, saved: Sequence[Node], changed: Set[Node]
) -> frozenset[str]:
    """The names of values in memory that others may change without that plain PyTorch notices it.

    Args:
        saved: values of the joint graph, in the order in which ``backward`` takes them.
        changed: values in whose memory the forward writes, so that copies of them are saved.
    """
    if any(mark_of(node) is not None for node in joint.module.graph.nodes):
        # A checkpoint of plain PyTorch reads what it computes from as it is by then.
        return frozenset()
    results, inputs = _results(joint.module.graph), joint.module.graph.find_nodes(op="placeholder")
    tangents_of: dict[Node, Sources] = {}
    for nodes, unnoticed in ((inputs, joint.unnoticed_inputs), (results, joint.unnoticed_outputs)):
        for k, tangents in unnoticed.items():
            if (node := nodes[k]) is not None:
                tangents_of[memory_of(node)] = tangents_of.get(memory_of(node), 0) | tangents
    count = len(joint.signature.tangents)
    readers = reading_tangents(backward.graph, joint.tangents[:count])
    return frozenset(
        node.name
        for node, reading in zip(saved, readers, strict=False)
        if memory_of(node) not in changed
        and ((tangents := tangents_of.get(memory_of(node), 0)) == (1 << count) - 1 or tangents & reading)
    )


def _needed_numbers(
    graph: Graph, saved: Sequence[Node], gradients: Sequence[Node | None], only_backward: Set[Node]
) -> list[Node]:
    """The numbers of the forward that the backward reads; what they are computed from it need not know."""
    numbers = {node for node in graph.nodes if is_number(node) and node not in only_backward}
    if not numbers:
        return []
    results = [node for node in gradients if node is not None]
    effects = [node for node in only_backward if acts(node)]
    needed = ancestors([*results, *effects], numbers | set(saved))
    return [node for node in graph.nodes if node in needed and node in numbers]


def _results(graph: Graph) -> list[Node | None]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _extract(
    module: GraphModule,
    inputs: Mapping[Node, str],
    results: Sequence[Node | None],
    effects: Sequence[Node],
    at_once: Set[Node] = frozenset(),
    on_demand: Set[Node] = frozenset(),
) -> GraphModule:
    """The part of a graph between two sets of values, in the order of the original.

    Args:
        module: the graph.
        inputs: values that come from outside -> names of their placeholders.
        results: what the part returns.
        effects: nodes to keep although nobody may use them: a random operator moves the generator.
        at_once: values that are computed just after what they are computed from instead: where the forward computes
            something for the backward, it need not lie in memory, nor be read again, at the forward's end.
        on_demand: values that are computed just before their first use instead, so that what the backward
            computes again does not all lie in memory at its start.
    """
    needed = ancestors([*(node for node in results if node is not None), *effects], inputs)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node, name in inputs.items():
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    places: dict[Node, int] = {}
    for place, node in enumerate(module.graph.nodes):
        read = (places[source] for source in node.all_input_nodes)
        places[node] = max(read, default=place) if node in at_once else place
    for node in sorted(places, key=places.__getitem__):
        if node in needed and node not in on_demand:
            copy_after_sources(node, graph, copies)
    for node in results:
        if node is not None:
            copy_after_sources(node, graph, copies)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    graph.lint()
    return lazy_module(module, graph)


def _copy_saved(forward: GraphModule, saved: Sequence[Node]) -> dict[Node, Node]:
    """Makes the forward return copies of some values in the values' stead; returns the copies.

    Inputs that the program changes are changed when the forward has ended, and the backward needs the old
    values of them and of their views.
    """
    if not saved:
        return {}
    sources = {node.name: node for node in forward.graph.nodes}
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    # After the program's own results, among which the value may be too.
    place = {node: position for position, node in enumerate(results)}
    copies = {}
    for node in saved:
        source = sources[node.name]
        with forward.graph.inserting_before(output):
            copy = forward.graph.call_function(torch.ops.aten.clone.default, (source,))
        copy.meta["val"] = source.meta["val"].clone()
        results[place[source]] = copy
        copies[node] = copy
    output.args = (tuple(results),)
    forward.recompile()
    return copies


def _read_copies(backward: GraphModule, copies: Sequence[Node]) -> None:
    """Gives inputs of the backward that are copies the copies' strides, and their views those that follow."""
    metas = {copy.name: copy.meta["val"] for copy in copies}
    laid_out = set[Node]()
    for node in backward.graph.nodes if copies else ():
        if node.name in metas:
            node.meta["val"] = metas[node.name]
        elif is_view(node) and not laid_out.isdisjoint(node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
        else:
            continue
        laid_out.add(node)
