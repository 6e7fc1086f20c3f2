"""What the lowering decides about a graph before it emits anything.

Three questions, answered by one walk from the outputs to the inputs: which nodes are alive; which must lie in
memory because a torch kernel or the caller reads them; and by how many separate nests an inlined value would
be computed. Destinations of results are carried back through views to the node that computes the data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.row_chunks import AFTER, WIDE_PRODUCT, multiplies_wide
from gradsplit.compile_core.ir.scatters import combines_at_indices
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import (
    IN_PLACE_VARIANTS,
    READ_ALIGNED_ROWS,
    scalar_factor,
)
from gradsplit.compile_core.lowering.graph_to_loops.index_rules import INDEX_RULES, SHAPE_READERS
from gradsplit.compile_core.lowering.graph_to_loops.lower_pooling import POOLING
from gradsplit.compile_core.lowering.graph_to_loops.reduction_rules import is_reduction
from gradsplit.compile_core.lowering.graph_to_loops.scalar_rules import is_pointwise
from gradsplit.compile_core.lowering.graph_to_loops.view_rules import SPLITTING_VIEWS, VIEWS, restride
from gradsplit.compile_core.lowering.nests.body_builder import is_loop_dtype
from gradsplit.compile_core.torch_facts.dispatcher import acts, draws_in_memory_order

aten = torch.ops.aten

# How a node uses its arguments.
INLINE, RE_INDEX, NEST, MEMORY = "inline", "re-index", "nest", "memory"


@dataclass
class GraphPlan:
    """Facts by node.

    Attributes:
        alive: nodes that outputs or side effects depend on.
        in_memory: nodes whose data must lie in memory.
        readers: the nodes (nests, torch kernels, outputs) that would each read or recompute the node. Two at most,
            whatever their number: along a chain of inlined nodes sets of all of them would grow with its length.
        widest_user: the largest number of elements for which the node would be recomputed.
        places: where the caller wants the node's data.
        factors: matrix products that are computed with a factor.
        wide: matrix products that yield float32 of factors of bfloat16.
        absorbed: the multiplications and conversions that those took over; they are the identity now.
        viewed: how many elements of a node its views in memory cover.
        bare: ``addmm`` nodes that become a product, whose bias the next loop body adds.
        laid_out: nodes whose elements lie as in the graph, as far apart and at the same place of what they view.
    """

    alive: set[torch.fx.Node] = field(default_factory=set)
    in_memory: set[torch.fx.Node] = field(default_factory=set)
    readers: dict[torch.fx.Node, set[torch.fx.Node]] = field(default_factory=dict)
    widest_user: dict[torch.fx.Node, int] = field(default_factory=dict)
    places: dict[torch.fx.Node, View] = field(default_factory=dict)
    factors: dict[torch.fx.Node, float] = field(default_factory=dict)
    wide: set[torch.fx.Node] = field(default_factory=set)
    absorbed: set[torch.fx.Node] = field(default_factory=set)
    viewed: dict[torch.fx.Node, int] = field(default_factory=dict)
    bare: set[torch.fx.Node] = field(default_factory=set)
    laid_out: set[torch.fx.Node] = field(default_factory=set)
    _kinds: dict[torch.fx.Node, str] = field(default_factory=dict)

    def use_kind(self, node: torch.fx.Node) -> str:
        """How a node uses its tensor arguments."""
        # Each of its arguments asks this again, and a concatenation of thousands has to look at all of them.
        if node not in self._kinds:
            self._kinds[node] = _use_kind(node)
        return self._kinds[node]

    def add_readers(self, node: torch.fx.Node, readers: set[torch.fx.Node]) -> None:
        known = self.readers.setdefault(node, set())
        if len(known) < 2:
            known.update(itertools.islice(readers - known, 2 - len(known)))

    def only_user(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The single node (through views) that uses a node's elements, if it is only one."""
        while True:
            users = [user for user in node.users if user in self.alive]
            if len(users) != 1:
                return None
            node = users[0]
            if self.use_kind(node) != RE_INDEX:
                return node


def _use_kind(node: torch.fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return MEMORY
    if target in VIEWS or target in SPLITTING_VIEWS or target is operator.getitem:
        return RE_INDEX
    if not _is_real(node) or _may_divide_by_zero(node):
        return MEMORY
    if is_pointwise(target) or target in INDEX_RULES:
        return INLINE
    if is_reduction(target):
        return MEMORY if _is_extremum_of_nothing(node) else NEST
    if target is aten.cat.default or target in POOLING or combines_at_indices(node):
        return NEST
    return MEMORY


def _is_extremum_of_nothing(node: torch.fx.Node) -> bool:
    """Which there is none, as torch's kernel will say."""
    (tensor,) = node.all_input_nodes
    result = node.meta["val"]
    first = result[0] if isinstance(result, (tuple, list)) else result
    return (
        getattr(node.target, "overloadpacket", None) in _EXTREMA
        and not tensor.meta["val"].numel()
        and first.numel() > 0
    )


def _may_divide_by_zero(node: torch.fx.Node) -> bool:
    """Whether this is a division of integers for which torch's CPU kernel may raise, as loops cannot."""
    if getattr(node.target, "overloadpacket", None) not in _DIVISIONS:
        return False
    result = node.meta["val"]
    divisor = node.args[1]
    is_safe = isinstance(divisor, (int, float)) and divisor != 0
    return result.device.type == "cpu" and not result.dtype.is_floating_point and not is_safe


_EXTREMA = frozenset({aten.max, aten.min, aten.amax, aten.amin, aten.argmax, aten.argmin})
_DIVISIONS = frozenset(
    {torch.ops.aten.div, torch.ops.aten.floor_divide, torch.ops.aten.remainder, torch.ops.aten.fmod}
)


def _is_real(node: torch.fx.Node) -> bool:
    """Whether every tensor that a node touches is strided and of a dtype that bodies can compute with."""
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    return all(
        is_loop_dtype(tensor.dtype) for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)
    )


def numel_of(node: torch.fx.Node) -> int:
    leaves = tree_leaves(node.meta.get("val"))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def plan_graph(graph: torch.fx.Graph, places: Mapping[torch.fx.Node, View]) -> GraphPlan:
    """Plans a graph whose results in ``places`` the caller wants at given places."""
    plan = GraphPlan(places=dict(places))
    for node in graph.nodes:
        _absorb_factor(node, plan)
        _absorb_conversion(node, plan)
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or node in plan.alive or _has_effect(node):
            plan.alive.add(node)
            # Torch's kernel, which makes what is complex, is given the tensor.
            if node.target not in SHAPE_READERS or plan.use_kind(node) == MEMORY:
                plan.alive.update(node.all_input_nodes)
                _note_uses(node, plan)
    for node in list(plan.places):
        _carry_back(node, plan)
    return plan


def _has_effect(node: torch.fx.Node) -> bool:
    """Whether it raises, or changes memory or the state of a generator, as eager would for numbers that nobody uses."""
    if acts(node):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _absorb_factor(node: torch.fx.Node, plan: GraphPlan) -> None:
    """Makes a factor of a matrix product (or of views of one) the product's own, if nothing else uses the
    product.
    """
    found = scalar_factor(node)
    if found is None:
        return
    product, factor = found
    while len(product.users) == 1 and product.target in VIEWS and isinstance(product.args[0], torch.fx.Node):
        product = product.args[0]
    if product.target is aten.mm.default and len(product.users) == 1:
        plan.factors[product] = factor
        plan.absorbed.add(node)


def _absorb_conversion(node: torch.fx.Node, plan: GraphPlan) -> None:
    """Has a product that the caller gets as float32, as the gradient of a weight under autocast, yield that: it is not
    rounded to bfloat16 on the way, and neither written nor read once more."""
    product = node.args[0] if node.target is aten._to_copy.default else None
    if (
        isinstance(product, torch.fx.Node)
        and product.target is aten.mm.default
        and len(product.users) == 1
        and all(user.op == "output" for user in node.users)
        and (product.meta["val"].dtype, node.meta["val"].dtype) == (torch.bfloat16, torch.float32)
        and node.meta["val"].device == product.meta["val"].device
        and multiplies_wide(product.meta["val"].device, torch.bfloat16)
    ):
        plan.wide.add(product)
        plan.absorbed.add(node)


def _leaves_bias(node: torch.fx.Node, plan: GraphPlan) -> bool:
    """On CPUs ``addmm`` first fills its result with the bias: a pass that the next loop body can save."""
    if node.target is not aten.addmm.default or node.kwargs or node in plan.in_memory or node in plan.places:
        return False
    bias, *factors = node.all_input_nodes
    if (
        bias in factors
        or bias.meta["val"].dim() != 1
        or node.meta["val"].device.type != "cpu"
        or not _is_real(node)
    ):
        return False
    user = plan.only_user(node)
    return len(plan.readers.get(node, ())) == 1 or (user is not None and plan.use_kind(user) != MEMORY)


def _note_uses(user: torch.fx.Node, plan: GraphPlan) -> None:
    """Notes with a user's arguments how they are used; the user's own uses are known already."""
    kind = RE_INDEX if user in plan.absorbed else plan.use_kind(user)
    if _leaves_bias(user, plan):
        plan.bare.add(user)
        bias = user.all_input_nodes[0]
        plan.add_readers(bias, plan.readers.get(user, set()))
        plan.widest_user[bias] = numel_of(user)
        plan.in_memory.update(user.all_input_nodes[1:])
        return
    inlined = kind in (INLINE, RE_INDEX) and user not in plan.in_memory
    readers = plan.readers.get(user, set()) if inlined else {user}
    if user.target in READ_ALIGNED_ROWS or draws_in_memory_order(user):
        plan.laid_out.update(user.all_input_nodes)
    for argument in user.all_input_nodes:
        plan.add_readers(argument, readers)
        reaches = plan.widest_user.get(user, 0) if kind == RE_INDEX else numel_of(user)
        if kind == NEST:
            reaches = max(map(numel_of, user.all_input_nodes))
        plan.widest_user[argument] = max(plan.widest_user.get(argument, 0), reaches)
        if kind == MEMORY:
            if not _is_only_copied(user, argument):
                plan.in_memory.add(argument)
        elif kind == RE_INDEX and user in plan.in_memory:
            # views that lie in memory force their base there once they cover it together
            plan.viewed[argument] = plan.viewed.get(argument, 0) + numel_of(user)
            is_part = numel_of(user) < numel_of(argument) or _has_gaps(user.meta["val"])
            if user in plan.laid_out and is_part:
                plan.laid_out.add(argument)
                plan.in_memory.add(argument)
            elif plan.viewed[argument] >= numel_of(argument):
                plan.in_memory.add(argument)


def _has_gaps(tensor: Any) -> bool:
    """Whether there is memory between the elements of a tensor, or of the one that it repeats; several have none."""
    if not isinstance(tensor, torch.Tensor):
        return False
    spec = TensorSpec.of(tensor)
    once = tuple(size if step else 1 for size, step in zip(spec.shape, spec.stride, strict=True))
    return not replace(spec, shape=once).is_dense


def in_place_variant(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """What changes a copy of the first argument, where the node's operator does so and a nest can copy it."""
    variant = IN_PLACE_VARIANTS.get(node.target)  # type: ignore[call-overload]
    return variant if variant is not None and is_loop_dtype(node.meta["val"].dtype) else None


def takes_over(node: torch.fx.Node, plan: GraphPlan) -> bool:
    """Whether a node that changes a copy of its first argument may change that itself: it has memory of its own, whose
    elements nobody else reads and in which nobody wants the result."""
    source = node.args[0]
    if not isinstance(source, torch.fx.Node) or node in plan.places:
        return False
    is_own = source.target is WIDE_PRODUCT or in_place_variant(source) is not None
    readers = {
        user
        for user in source.users
        if user in plan.alive and not (user.target is AFTER and user.args[0] is not source)
    }
    return is_own and readers == {node} and _is_only_copied(node, source)


def _is_only_copied(user: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """Whether all that a torch kernel does with an argument is to change a copy of it."""
    if in_place_variant(user) is None or user.args[0] is not argument:
        return False
    return argument not in tree_leaves((user.args[1:], user.kwargs))


def _carry_back(node: torch.fx.Node, plan: GraphPlan) -> None:
    """A view's destination becomes that of the data it views, where strides can say so."""
    place = plan.places[node]
    while node in plan.absorbed or (node.op == "call_function" and node.target in VIEWS):
        base = node.all_input_nodes[0]
        if base in plan.places or numel_of(base) != numel_of(node):
            return
        inverse = _inverse_place(node, base.meta["val"], place)
        if inverse is None:
            return
        place = plan.places[base] = inverse
        node = base


def _inverse_place(node: torch.fx.Node, base: torch.Tensor, place: View) -> View | None:
    """Where ``base`` must lie so that its view ``node`` lies at ``place``."""
    target, args = node.target, node.args
    if target not in VIEWS:
        return place  # what a product took over
    if target in (aten.t.default, aten.transpose.int):
        dims: Any = args[1:] or ((0, 1) if base.dim() > 1 else (0, 0))
        return restride(place, lambda t: t.transpose(*dims)) if base.dim() else place
    if target is aten.permute.default:
        order: Any = args[1]
        positions = [d % base.dim() for d in order]
        back = sorted(range(len(positions)), key=positions.__getitem__)
        return restride(place, lambda t: t.permute(back))
    if target in (aten.as_strided.default, aten.unfold.default, aten.diagonal.default):
        return None
    return restride(place, lambda t: t.view(base.shape))
