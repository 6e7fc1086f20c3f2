"""Cuts a joint graph into a forward and a backward so that the fewest bytes live between them.

The cut is a minimum cut of a flow network, as in AOTAutograd's recomputation ("min-cut rematerialisation"):
every value that could be saved is an edge whose capacity is its bytes, the forward's inputs are the source,
whatever only the backward can compute is the sink. Values cut are saved; values between the cut and the
backward are computed again there. Values that may not be recomputed hang on the source with infinite
capacity.

What a checkpoint of the program marks is never saved, whatever it costs (see ``recompute_regions``).

Limits: no memory budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import networkx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from compile_core.autograd.recompute_policy import is_fusible, is_recomputable, is_reduction, is_view
from compile_core.autograd.recompute_regions import is_recomputed
from compile_core.errors import InternalError
from compile_core.ir.graphs import JointGraph, PartitionedGraph
from compile_core.ir.random_operators import is_random

# A saved input costs no new memory, but one tensor more to keep track of.
_PRIMAL_BYTES = 1
# Each step away from the backward makes a value this much dearer to save there: cut late rather than early.
_DISTANCE_WEIGHT = 1.1
_MAX_DISTANCE = 100
# A value that stays inside kernels unless it is saved costs its writing too.
_EXTRA_WRITE_WEIGHT = 2


def partition(joint: JointGraph) -> PartitionedGraph:
    """The two programs of a joint graph; an inference graph has no backward."""
    if not joint.tangents:
        return PartitionedGraph(joint.module, None, joint.num_outputs, (), 0, joint.signature)
    nodes = {node.name: node for node in joint.module.graph.nodes}
    primals = [nodes[name] for name in joint.primals]
    tangents = [nodes[name] for name in joint.tangents]
    results = _results(joint.module.graph)
    outputs, gradients = results[: joint.num_outputs], results[joint.num_outputs :]

    only_backward = _descendants(tangents)
    for output in outputs:
        if output in only_backward:
            raise InternalError(f"forward output {output} depends on a tangent")
    changed = {primals[mutation.input] for mutation in joint.signature.mutated}
    in_forward = _ancestors(node for node in outputs if node is not None)
    saved = _choose_saved(joint.module.graph, primals, changed, in_forward, only_backward, gradients)
    computed = [node for node in saved if node.op != "placeholder" or node in changed]
    random = [node for node in joint.module.graph.nodes if is_random(node)]
    forward = _extract(
        joint.module,
        {node: node.name for node in primals},
        [*outputs, *computed],
        effects=[node for node in random if node not in only_backward],
    )
    names = {node: _copy_input(forward, node.name) if node in changed else node.name for node in saved}
    backward = _extract(
        joint.module,
        names | {node: node.name for node in tangents},
        gradients,
        effects=[node for node in random if node in only_backward],
    )
    return PartitionedGraph(
        forward=forward,
        backward=backward,
        num_outputs=joint.num_outputs,
        saved=tuple(names.values()),
        saved_bytes=sum(_bytes(node) for node in computed),
        signature=joint.signature,
    )


def _choose_saved(
    graph: Graph,
    primals: Sequence[Node],
    changed: set[Node],
    in_forward: set[Node],
    only_backward: set[Node],
    gradients: Iterable[Node | None],
) -> list[Node]:
    """The values to save, in graph order: a minimum cut between the primals and the backward."""
    sources = set(primals)
    free = sources - changed
    needed = _ancestors(
        [
            *(node for user in only_backward for node in user.all_input_nodes if node not in only_backward),
            *(node for node in gradients if node is not None and node not in only_backward),
        ]
    )
    distances = _distances(graph, only_backward, needed)

    network = networkx.DiGraph()
    for node in graph.nodes:
        if node in only_backward or node.op == "output" or node not in needed:
            continue
        recomputed = is_recomputed(node, in_forward)
        capacity = math.inf if recomputed else _capacity(node, free, distances.get(node, 0))
        network.add_edge((node, "in"), (node, "out"), capacity=capacity)
        if node in sources or (
            not recomputed and _must_not_recompute(node, in_forward, only_backward, needed)
        ):
            network.add_edge("source", (node, "in"), capacity=math.inf)
        for user in node.users:
            if user in only_backward:
                network.add_edge((node, "out"), "sink", capacity=math.inf)
            elif user in needed:
                network.add_edge((node, "out"), (user, "in"), capacity=math.inf)
    for gradient in gradients:
        # A gradient that does not depend on a tangent, such as a constant zero, is still the backward's to
        # return.
        if gradient is not None and gradient not in only_backward:
            network.add_edge((gradient, "out"), "sink", capacity=math.inf)
    if "sink" not in network or "source" not in network:
        return []
    _, (reachable, _) = networkx.minimum_cut(network, "source", "sink", flow_func=boykov_kolmogorov)
    return [node for node in graph.nodes if (node, "in") in reachable and (node, "out") not in reachable]


def _ancestors(values: Iterable[Node]) -> set[Node]:
    """The values and all that they are computed from."""
    found: set[Node] = set()
    frontier = list(values)
    while frontier:
        node = frontier.pop()
        if node not in found:
            found.add(node)
            frontier.extend(node.all_input_nodes)
    return found


def _distances(graph: Graph, only_backward: set[Node], needed: set[Node]) -> dict[Node, int]:
    """Steps from each forward value to the nearest use in the backward."""
    distances: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node in needed:
            steps = [0 if user in only_backward else 1 + distances[user] for user in node.users
                     if user in only_backward or user in distances]  # fmt: skip
            distances[node] = min(steps, default=0)
    return distances


def _must_not_recompute(
    node: Node, in_forward: set[Node], only_backward: set[Node], needed: set[Node]
) -> bool:
    if node.op == "get_attr":
        return False  # both parts own the constant
    if node not in in_forward:
        # Only the backward wants it, so computing it there is no second time; but random
        # numbers keep their order.
        return is_random(node)
    return not is_recomputable(node) or _materialised_in_backward(node, only_backward, needed)


def _materialised_in_backward(node: Node, only_backward: set[Node], needed: set[Node]) -> bool:
    """Whether computing the node again would write it to memory for a kernel that cannot fuse it.

    It was written for the same reason in the forward; saving it costs memory, recomputing it another pass.
    """
    if is_view(node):
        return False
    frontier = list(node.users)
    while frontier:
        user = frontier.pop()
        if user in only_backward:
            if is_view(user):
                frontier.extend(user.users)
            elif not is_fusible(user) and user.op == "call_function":
                return True
        elif is_view(user) and user in needed:
            frontier.extend(user.users)
    return False


def _capacity(node: Node, free: set[Node], distance: int) -> float:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return math.inf  # several results: each of its ``getitem`` is saved, never the tuple
    if node in free:
        return _PRIMAL_BYTES
    extra = 1 if _is_written(node) else _EXTRA_WRITE_WEIGHT
    return max(_bytes(node), 1) * extra * _DISTANCE_WEIGHT ** min(distance, _MAX_DISTANCE)


def _is_written(node: Node) -> bool:
    """Whether the value lies in memory anyway, for one of torch's kernels or as a result."""
    source = node
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
    return not is_fusible(source) or _is_read_from_memory(node) or _is_residual(node)


def _is_residual(node: Node) -> bool:
    """Whether kernels that cannot be one read the value: a norm, which reduces it and reads it again, and others.

    So it is with the sums of residual branches. Were the branches saved instead, at the same number of bytes, the
    backward would add up all of them again.
    """
    reductions = sum(is_reduction(user) for user in node.users)
    return reductions > 0 and len(node.users) - reductions > 1


def _is_read_from_memory(node: Node) -> bool:
    return any(_is_read_from_memory(user) if is_view(user) else not is_fusible(user) for user in node.users)


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def _descendants(roots: Iterable[Node]) -> set[Node]:
    found = set(roots)
    frontier = list(found)
    while frontier:
        for user in frontier.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                frontier.append(user)
    return found


def _results(graph: Graph) -> list[Node | None]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _extract(
    module: GraphModule, inputs: Mapping[Node, str], results: Sequence[Node | None], effects: Sequence[Node]
) -> GraphModule:
    """The part of a graph between two sets of values, in the order of the original.

    Args:
        module: the graph.
        inputs: values that come from outside -> names of their placeholders.
        results: what the part returns.
        effects: nodes to keep although nobody may use them: a random operator moves the generator.
    """
    needed: set[Node] = set()
    frontier = [*(node for node in results if node is not None), *effects]
    while frontier:
        node = frontier.pop()
        if node not in needed:
            needed.add(node)
            if node not in inputs:
                frontier.extend(node.all_input_nodes)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node, name in inputs.items():
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in copies or node not in needed:
            continue
        if node.op == "placeholder":
            raise InternalError(f"the extracted graph needs {node}, which is not among its inputs")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    graph.lint()
    with _use_lazy_graph_module(True):
        return _make_graph_module(module, graph)


def _copy_input(forward: GraphModule, name: str) -> str:
    """Makes the forward return a copy of an input in the input's stead; returns the copy's name.

    Inputs that the program changes are changed when the forward has ended, and the backward needs the old
    values.
    """
    (source,) = (node for node in forward.graph.find_nodes(op="placeholder") if node.name == name)
    (output,) = forward.graph.find_nodes(op="output")
    with forward.graph.inserting_before(output):
        copy = forward.graph.call_function(torch.ops.aten.clone.default, (source,))
    copy.meta["val"] = source.meta["val"].clone()
    output.replace_input_with(source, copy)
    forward.recompile()
    return copy.name
