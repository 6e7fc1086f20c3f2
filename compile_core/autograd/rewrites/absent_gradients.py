"""Keeps what a backward computes of gradients that do not arrive apart from what it computes of those that do.

A gradient that does not arrive at a result, since the loss does not depend on it, is undefined: plain PyTorch never
comes to the functions before it. The backward of a whole graph is one program, which gets zeros there, and computes
infinity times zero where a derivative is infinite. So where two values meet that depend on different gradients,
usually to be added, either is replaced by zeros if none of its gradients has arrived. Flags tell the program, which
are further inputs. So nothing is compiled for each set of gradients that may arrive, and what is chosen is part of the
kernels that add.

``joint_arrival`` says where a value is defined though the gradients that it is computed from have not arrived; it is
left out here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.autograd.operators.gradient_sources import (
    Sources,
    element_sources,
    gradient_sources,
    results_of,
)
from gradsplit.compile_core.autograd.operators.graph_nodes import add_call
from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL, drop_joint_arrivals
from gradsplit.compile_core.autograd.operators.kinds import is_view, packet
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.numbers import is_number

aten = torch.ops.aten

# Of zeros they make zeros, if they read nothing else.
_LINEAR = {aten.neg, aten.sum, aten.clone, aten._to_copy, aten.cat, aten.stack}


def keep_absent_apart(joint: JointGraph) -> JointGraph:
    """The joint graph, with flags after its tangents if it needs some; changes its module."""
    apart = _with_flags(joint) if len(joint.tangents) > 1 else joint
    drop_joint_arrivals(joint.module.graph)
    joint.module.recompile()
    return apart


def _with_flags(joint: JointGraph) -> JointGraph:
    separation = _Separation(joint)
    for node in [*joint.module.graph.nodes]:
        separation.visit(node)
    separation.visit_gradients(joint.num_outputs)
    return replace(
        joint,
        tangents=(*joint.tangents, *(flag.name for flag in separation.flags.values())),
        signature=replace(joint.signature, presence=tuple(sources for sources, _ in separation.flags)),
    )


class _Separation:
    """A walk over a joint graph.

    Attributes:
        sources: of each value, the gradients that its elements depend on.
        results: the results that these are of.
        defined_by: those that make it defined.
        zeros: values that are zeros if none of these arrives.
        kept: values with zeros in their place then.
        flags: by gradients and device, the placeholder for whether any of them has arrived.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.graph = joint.module.graph
        self.defined_by = gradient_sources(self.graph, joint.tangents)
        self.sources = element_sources(self.defined_by, len(joint.tangents))
        # Values of the same results are not kept apart where the engine may come to one of them with nothing, which is
        # rare: a flag would stand before each custom function.
        self.results = {node: results_of(of, len(joint.tangents)) for node, of in self.sources.items()}
        tangents = set(joint.tangents)
        self.zeros = {node for node in self.sources if node.name in tangents}
        self.kept: dict[Node, Node] = {}
        self.flags: dict[tuple[Sources, torch.device], Node] = {}
        self.last_input = self.graph.find_nodes(op="placeholder")[-1]

    def visit(self, node: Node) -> None:
        results = self.results[node]
        if not results or node.op != "call_function":
            return
        for value in node.all_input_nodes:
            # A number is a size, which does not depend on what arrives.
            is_tensor = isinstance(value.meta["val"], torch.Tensor)
            if is_tensor and self.results[value] not in (0, results) and value not in self.zeros:
                node.replace_input_with(value, self._zeros_if_absent(value))
        is_sum = packet(node) in (aten.add, aten.sub) and all(isinstance(term, Node) for term in node.args)
        is_linear = is_sum or is_view(node) or packet(node) in _LINEAR
        if node.target is JOINT_ARRIVAL:
            is_zeros = node.args[0] in self.zeros or _is_filled_with_zeros(node.args[0])
        else:
            # A view also reads the sizes that it has.
            is_zeros = is_linear and self.zeros.issuperset(
                read for read in node.all_input_nodes if not is_number(read)
            )
        if is_zeros:
            self.zeros.add(node)

    def visit_gradients(self, num_outputs: int) -> None:
        """The results after the first ones: defined, they are zeros if nothing has arrived for their elements."""
        (output,) = self.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        for position, value in enumerate(outputs):
            if position < num_outputs or value is None or value in self.zeros:
                continue
            if 0 != self.sources[value] != self.defined_by[value]:
                outputs[position] = self._zeros_if_absent(value)
        output.args = (tuple(outputs),)

    def _zeros_if_absent(self, value: Node) -> Node:
        if value in self.kept:
            return self.kept[value]
        example = value.meta["val"]
        function: Any = value.target
        source: Any = value.args[0] if value.args else None
        if is_view(value) and isinstance(source.meta["val"], torch.Tensor):
            # A view stays one, or what is computed from it might get other strides.
            source = self._zeros_if_absent(source)
            with self.graph.inserting_before(value.next), example.fake_mode:
                kept = add_call(self.graph, value, function, source, *value.args[1:], **value.kwargs)
        else:
            flag = self._flag(self.sources[value], example)
            like: Any = {"dtype": example.dtype, "device": example.device, "pin_memory": False}
            with self.graph.inserting_before(value.next), example.fake_mode:
                zero = add_call(self.graph, value, aten.full.default, [], 0, **like)
                kept = add_call(self.graph, value, aten.where.self, flag, value, zero)
        self.kept[value] = kept
        self.zeros.add(kept)
        return kept

    def _flag(self, sources: Sources, example: Any) -> Node:
        key = (sources, example.device)
        if key not in self.flags:
            with self.graph.inserting_after(self.last_input):
                flag = self.graph.placeholder(f"any_arrived_{len(self.flags)}")
            with example.fake_mode:
                flag.meta["val"] = torch.empty((), dtype=torch.bool, device=example.device)
            self.flags[key] = self.last_input = flag
        return self.flags[key]


def _is_filled_with_zeros(node: Any) -> bool:
    filled = packet(node) in (aten.full, aten.full_like) and node.args[1] == 0
    return filled or packet(node) in (aten.zeros, aten.zeros_like)
