"""Which values to save: a minimum cut between the forward's inputs and the backward.

The cut is that of a flow network, as in AOTAutograd's recomputation ("min-cut rematerialisation"): every value that
could be saved is an edge whose capacity is its bytes, the forward's inputs are the source, whatever only the backward
can compute is the sink. Values cut are saved; values between the cut and the backward are computed again there. Values
that may not be recomputed hang on the source with infinite capacity. Numbers are no part of the network: to keep one
costs nothing. Bytes are those of the call that is compiled for.

What a checkpoint of the program orders goes before all costs (see ``recompute_orders``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from networkx import DiGraph
from networkx.algorithms.flow import shortest_augmenting_path
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.autograd.operators.kinds import (
    is_fusible,
    is_read_in_a_kernel,
    is_recomputable,
    is_reduction,
    is_view,
    packet,
)
from gradsplit.compile_core.autograd.partitioning.recompute_orders import Order
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.torch_facts.dispatcher import MATRIX_PRODUCTS, is_random
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation

# A saved input costs no new memory, but one tensor more to keep track of.
_PRIMAL_BYTES = 1
# Each step away from the backward makes a value this much dearer to save there: cut late rather than early.
_DISTANCE_WEIGHT = 1.1
_MAX_DISTANCE = 100
# A value that stays inside kernels unless it is saved costs its writing too.
_EXTRA_WRITE_WEIGHT = 2
# In which costs are counted, to a byte.
_UNITS = 1000
# Sums of branches are in memory anyway, and where the branches are saved at half the bytes, as under autocast, the
# backward begins by adding all of them up again: it has both in memory then.
_RESIDUAL_WEIGHT = 0.5
# What it is worth not to save, and what has so many times fewer elements than another that to read it costs nothing.
LARGE_BYTES = 4 << 20
FEW = 8


@dataclass(frozen=True)
class CutProblem:
    """A joint graph as the cut sees it.

    Attributes:
        graph: the joint graph.
        primals: the forward's inputs that are tensors.
        changed: those that the program changes in place; saving one means copying it.
        in_forward: what the forward's outputs are computed from.
        only_backward: what depends on a tangent.
        gradients: the backward's results.
        orders: values about which the program's checkpoints leave no choice.
        noticed: results in whose memory plain PyTorch saves a value. Its backward reads them as they are by then, also
            where the program has changed them behind autograd's back, so that ours reads the very same.
    """

    graph: Graph
    primals: Sequence[Node]
    changed: Set[Node]
    in_forward: Set[Node]
    only_backward: Set[Node]
    gradients: Sequence[Node | None]
    orders: Mapping[Node, Order]
    noticed: Set[Node] = frozenset()

    def computed_in_backward(self) -> set[Node]:
        """The values that plain PyTorch's backward computes from the results that it has saved."""
        found = set[Node]()
        for node in self.graph.nodes if self.noticed else ():
            is_free = node not in self.in_forward and node not in self.only_backward and not is_random(node)
            if is_free and any(source in self.noticed or source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def needed(self) -> set[Node]:
        """The values of the forward that the backward can be computed from, without numbers: these are all there."""
        numbers = {node for node in self.graph.nodes if is_number(node)}
        read = (node for user in self.only_backward for node in user.all_input_nodes)
        found = ancestors(
            [
                *(node for node in read if node not in self.only_backward),
                *(node for node in self.gradients if node is not None and node not in self.only_backward),
            ],
            numbers,
        )
        return found - numbers

    def is_computed(self, saved: Node) -> bool:
        """Whether a saved value takes memory of its own: it is no input, or a copy of one."""
        return saved.op != "placeholder" or saved in self.changed


def choose_saved(problem: CutProblem, recomputed: Set[Node] = frozenset()) -> list[Node]:
    """The values to save, in graph order.

    Args:
        problem: the graph.
        recomputed: values that may be computed again although it costs more than reading them.
    """
    graph, only_backward = problem.graph, problem.only_backward
    sources = set(problem.primals)
    free = sources - problem.changed
    needed = problem.needed()
    distances = _distances(graph, only_backward, needed)
    in_backward = problem.computed_in_backward()

    network = networkx.DiGraph()
    from_source, to_sink = set[Any](), set[Any]()
    flows = list[tuple[Any, Any]]()
    for node in graph.nodes:
        if node in only_backward or node.op == "output" or node not in needed:
            continue
        order = problem.orders.get(node)
        unsaved = order is Order.RECOMPUTE or (order is None and node in in_backward)
        capacity = math.inf if unsaved else _capacity(node, free, distances.get(node, 0))
        network.add_edge((node, "in"), (node, "out"), capacity=capacity)
        by_choice = order is None and node not in recomputed and is_pinned(problem, node, needed)
        if node in sources or order is Order.SAVE or by_choice:
            from_source.add((node, "in"))
        for user in node.users:
            if user in only_backward:
                to_sink.add((node, "out"))
            elif user in needed:
                flows.append(((node, "out"), (user, "in")))
    for gradient in problem.gradients:
        # A gradient that does not depend on a tangent, such as a constant zero, is still the backward's to return.
        if gradient is not None and gradient not in only_backward:
            to_sink.add((gradient, "out"))
    # No cut separates what hangs on the source or on the sink from it: other edges into the one or out of the other
    # say nothing. Without them a program of many layers is many small networks.
    network.add_edges_from(
        ((tail, head) for tail, head in flows if tail not in to_sink and head not in from_source),
        capacity=math.inf,
    )
    cut = set[Node]()
    for part in networkx.weakly_connected_components(network):
        cut |= _cut(network, part, from_source & part, to_sink & part)
    return [node for node in graph.nodes if node in cut]


def _cut(network: DiGraph, part: Set[Any], from_source: Set[Any], to_sink: Set[Any]) -> set[Node]:
    """The values of one part of the network that a minimum cut saves."""
    if not from_source or not to_sink:
        return set()
    if len(part) == 2 and all(
        map(math.isfinite, networkx.get_edge_attributes(network.subgraph(part), "capacity").values())
    ):
        return {node for node, _ in part}
    own = network.subgraph(part).copy()
    own.add_edges_from((("source", head) for head in from_source), capacity=math.inf)
    own.add_edges_from(((tail, "sink") for tail in to_sink), capacity=math.inf)
    # Of equal cuts this is the one nearest to the backward, whichever algorithm finds the flow. This one takes time
    # that grows with a long chain's length; networkx's Boykov-Kolmogorov and Dinitz take its square.
    _, (reachable, _) = networkx.minimum_cut(own, "source", "sink", flow_func=shortest_augmenting_path)
    return {
        node
        for node, side in part
        if side == "in" and (node, "in") in reachable and (node, "out") not in reachable
    }


def _distances(graph: Graph, only_backward: Set[Node], needed: Set[Node]) -> dict[Node, int]:
    """Steps from each forward value to the nearest use in the backward."""
    distances: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node in needed:
            steps = [0 if user in only_backward else 1 + distances[user] for user in node.users
                     if user in only_backward or user in distances]  # fmt: skip
            distances[node] = min(steps, default=0)
    return distances


def is_pinned(problem: CutProblem, node: Node, needed: Set[Node]) -> bool:
    """Whether computing the value again costs more than reading it, or would give another value."""
    if node.op == "get_attr":
        return False  # both parts own the constant
    if node not in problem.in_forward:
        # Only the backward wants it, so computing it there is no second time; but random
        # numbers keep their order.
        return is_random(node)
    if not node.all_input_nodes and is_returned(node):
        # The program may change it; the backward makes a constant of its own.
        return not is_recomputable(node)
    if node in problem.noticed:
        return True
    if not is_recomputable(node):
        return True
    readers = _readers_in_memory(node, problem.only_backward, needed)
    # The backward has a product for each operand's gradient, so that one of them can wait for another's.
    return bool(readers) and not (
        all(packet(reader) in MATRIX_PRODUCTS for reader in readers)
        and _is_written_beside(problem, node, needed)
    )


def is_returned(node: Node) -> bool:
    """Whether a result of the graph lies in the value's memory."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def _readers_in_memory(node: Node, only_backward: Set[Node], needed: Set[Node]) -> list[Node]:
    """What reads the node in the backward and cannot be one kernel with it, so that it would be written to memory.

    It was written for the same reason in the forward; saving it costs memory, recomputing it another pass.
    """
    readers: list[Node] = []
    frontier = [] if is_view(node) else list(node.users)
    while frontier:
        user = frontier.pop()
        if user in only_backward:
            if is_view(user):
                frontier.extend(user.users)
            elif not is_read_in_a_kernel(user) and user.op == "call_function":
                readers.append(user)
        elif is_view(user) and user in needed:
            frontier.extend(user.users)
    return readers


def _is_written_beside(problem: CutProblem, node: Node, needed: Set[Node]) -> bool:
    """Whether a kernel of the backward can write the value besides what it is there for.

    So it is with a large value on a GPU that is computed element by element from results of products, as by an
    activation function or by dropout, which a kernel of the backward reads anyway. Then it costs another write, and
    not to save it is worth that: it is half of what a perceptron keeps.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or bytes_of(node) < LARGE_BYTES:
        return False
    elements = value_at_compilation(value.numel())
    seen, frontier = {node}, list(node.all_input_nodes)
    while frontier:
        source = frontier.pop()
        if source in seen:
            continue
        seen.add(source)
        if is_recomputable(source):
            frontier.extend(source.all_input_nodes)
            continue
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or value_at_compilation(value.numel()) * FEW < elements:
            continue  # such as a bias or a sum of rows
        if (
            is_fusible(source)
            or source.op == "placeholder"
            or not _is_read_by_a_kernel(problem, source, node, needed)
        ):
            return False
    return True


def _is_read_by_a_kernel(problem: CutProblem, source: Node, apart_from: Node, needed: Set[Node]) -> bool:
    """Whether a generated kernel of the backward reads a value for something else, too."""
    seen, frontier = {apart_from}, list(source.users)
    while frontier:
        user = frontier.pop()
        if user in seen:
            continue
        seen.add(user)
        if user in problem.only_backward:
            if is_fusible(user) and not is_view(user):
                return True
        elif user in needed and is_recomputable(user):
            frontier.extend(user.users)
    return False


def _capacity(node: Node, free: set[Node], distance: int) -> float:
    """Infinite or a whole number: what rounding leaves of a capacity looks like a way past the cut."""
    cost = _cost(node, free, distance)
    return cost if math.isinf(cost) else round(cost * _UNITS)


def _cost(node: Node, free: set[Node], distance: int) -> float:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return math.inf  # several results: each of its ``getitem`` is saved, never the tuple
    if node in free:
        return _PRIMAL_BYTES
    extra = 1 if _is_written(node) else _EXTRA_WRITE_WEIGHT
    if _is_residual(node):
        extra *= _RESIDUAL_WEIGHT
    return max(bytes_of(node), 1) * extra * _DISTANCE_WEIGHT ** min(distance, _MAX_DISTANCE)


def _is_written(node: Node) -> bool:
    """Whether the value lies in memory anyway, for one of torch's kernels or as a result."""
    source = node
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
    return not is_fusible(source) or _is_read_from_memory(node) or _is_residual(node)


def _is_residual(node: Node) -> bool:
    """Whether kernels that cannot be one read the value: a norm, which reduces it and reads it again, and others.

    So it is with the sums of residual branches. Were the branches saved instead, at the same number of bytes, the
    backward would add up all of them again. The wide copy that a batch norm makes of its narrow input is no such sum.
    """
    if packet(node) is torch.ops.aten._to_copy:
        return False
    reductions = sum(is_reduction(user) for user in node.users)
    return reductions > 0 and len(node.users) - reductions > 1


def _is_read_from_memory(node: Node) -> bool:
    return any(
        _is_read_from_memory(user) if is_view(user) else not is_read_in_a_kernel(user) for user in node.users
    )


def bytes_of(node: Node) -> int:
    """The size of a tensor value."""
    value = node.meta["val"]
    return value_at_compilation(value.numel()) * value.dtype.itemsize
