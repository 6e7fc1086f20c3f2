"""Rules that joint graphs, partitions and schedules keep.

Each function returns nothing, or raises ``InternalError`` with the node or step and the rule that it breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.counter_random import COUNTER_OPERATORS, SEED_STRIDE
from gradsplit.compile_core.ir.graphs import GraphSignature, JointGraph, OpenSize, PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute, Schedule


def verify_joint(joint: JointGraph) -> None:
    """Functional, described by fake values, with the inputs and results that its signature counts."""
    _verify_functional("joint graph", joint.module)
    _expect_inputs("joint graph", joint.module, [*joint.primals, *joint.tangents])
    gradients = len(joint.signature.gradient_inputs)
    _expect_results("joint graph", joint.module, joint.num_outputs + gradients)
    _verify_signature(joint.signature, len(joint.primals), joint.num_outputs)
    sizes = graph_results(joint.module)[joint.num_outputs - joint.signature.open_sizes : joint.num_outputs]
    if not all(node is not None and is_number(node) for node in sizes):
        _broken("joint graph", "the open sizes are the last of its outputs")
    expected = len(joint.signature.tangents) + len(joint.signature.presence)
    if len(joint.tangents) != expected:
        _broken("joint graph", f"{len(joint.tangents)} tangents and flags, not {expected}")
    _verify_seeds(joint.module)


def verify_partition(joint: JointGraph, graph: PartitionedGraph) -> None:
    """The forward computes what the backward reads, and nothing that depends on a tangent."""
    _verify_functional("forward", graph.forward)
    _expect_inputs("forward", graph.forward, joint.primals)
    computed = [name for name in graph.saved if name not in joint.primals]
    _expect_results("forward", graph.forward, graph.num_outputs + len(computed))
    if graph.backward is None:
        return
    _verify_functional("backward", graph.backward)
    _expect_inputs("backward", graph.backward, [*graph.saved, *joint.tangents])
    _expect_results("backward", graph.backward, len(graph.signature.gradient_inputs))
    inputs = {node.name: node for node in graph_inputs(graph.backward)}
    kinds = [isinstance(inputs[name].meta.get("val"), torch.Tensor) for name in graph.saved]
    for name, is_tensor in zip(graph.saved, kinds, strict=True):
        if not is_tensor and not is_number(inputs[name]):
            _broken(f"saved value {name}", "only tensors and numbers are saved")
    if sorted(kinds, reverse=True) != kinds:
        _broken("saved values", "tensors come before numbers")


def verify_schedule(schedule: Schedule) -> None:
    """Values are known before they are read, and named once; every destination is written once."""
    known = set(schedule.inputs)
    for compute in schedule.computes:
        _verify_compute(compute, known)
        known.update(compute.outputs)
    destinations = schedule.destinations
    if len(set(destinations)) != len(destinations):
        _broken(schedule.name, f"a destination is written once: {destinations}")
    for name in schedule.outputs:
        if name is not None and name not in known:
            _broken(f"{schedule.name}: result {name}", "a result is an input or computed by a region")


def _verify_compute(step: Compute, known: set[str]) -> None:
    _verify_functional(step.name, step.module)
    if len(graph_inputs(step.module)) != len(step.inputs):
        _broken(step.name, f"{len(step.inputs)} inputs for {len(graph_inputs(step.module))} placeholders")
    _expect_results(step.name, step.module, len(step.outputs))
    for name in step.inputs:
        if name not in known:
            _broken(f"{step.name}: input {name}", "a region reads what is known before it")
    for name in step.outputs:
        if name in known or step.outputs.count(name) > 1:
            _broken(f"{step.name}: result {name}", "a value is named once")
    for name in step.destinations:
        if name not in step.outputs:
            _broken(f"{step.name}: destination of {name}", "what is stored is a result")


def _verify_seeds(module: GraphModule) -> None:
    used: set[tuple[Node, int]] = set()
    for node in module.graph.nodes:
        if node.target in COUNTER_OPERATORS:
            seeds, slot = node.args[:2]
            rows = seeds.meta["val"]
            if rows.dtype != torch.int64 or rows.shape[1:] != (SEED_STRIDE,) or not 0 <= slot < rows.shape[0]:
                _broken(f"joint graph: {node.name}", f"slot {slot} is no row of seeds")
            if (seeds, slot) in used:
                _broken(f"joint graph: {node.name}", "a seed serves one random operator")
            used.add((seeds, slot))


def _verify_signature(signature: GraphSignature, primals: int, outputs: int) -> None:
    positions = [position for position in signature.results if isinstance(position, int)]
    if any(not 0 <= position < outputs for position in [*positions, *signature.tangents]):
        _broken("signature", f"results and tangents are among the {outputs} outputs")
    if any(not 0 <= position < primals for position in signature.gradient_inputs):
        _broken("signature", f"gradient inputs are among the {primals} primals")
    if any(not (0 <= m.input < primals and 0 <= m.output < outputs) for m in signature.mutated):
        _broken("signature", "a changed input is a primal, its new value an output")
    aliases = [result for result in signature.results if not isinstance(result, int)]
    if any(not 0 <= alias.position < (primals if alias.of_input else outputs) for alias in aliases):
        _broken("signature", "an alias is one of a primal or an output")
    sizes = [size for spec in signature.tangent_specs for size in (*spec.shape, *spec.stride)]
    for alias in aliases:
        if alias.view is not None:
            sizes += [*alias.view[0], *alias.view[1], alias.view[2]]
    if any(isinstance(size, OpenSize) and not 0 <= size.position < signature.open_sizes for size in sizes):
        _broken("signature", f"an open size is one of the {signature.open_sizes} that the graph returns")
    if len(signature.gradient_tangents) != len(signature.gradient_inputs):
        _broken("signature", "each gradient says which tangents it depends on")
    groups = signature.tangent_groups
    if len(groups) != len(signature.tangents) or any(not group >> k & 1 for k, group in enumerate(groups)):
        _broken("signature", "each tangent is in a group")
    if any(not 0 <= k < len(signature.gradient_inputs) for k in signature.left_undefined):
        _broken("signature", "what is left undefined is among the gradients")


def _verify_functional(where: str, module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op != "call_function":
            _broken(f"{where}: {node.name}", f"a node of kind {node.op} is no operator")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _broken(f"{where}: {node.name}", f"{node.target} changes its arguments")
        if "val" not in node.meta:
            _broken(f"{where}: {node.name}", "every node carries its fake value")


def _expect_inputs(where: str, module: GraphModule, names: Sequence[str]) -> None:
    found = [node.name for node in graph_inputs(module)]
    if found != list(names):
        _broken(where, f"inputs are {found}, not {list(names)}")


def _expect_results(where: str, module: GraphModule, count: int) -> None:
    results = graph_results(module)
    if len(results) != count:
        _broken(where, f"{len(results)} results, not {count}")
    for result in results:
        if result is not None and not isinstance(result, Node):
            _broken(where, f"the result {result!r} is no node")


def _broken(where: str, rule: str) -> NoReturn:
    raise InternalError(f"{where}: {rule}")
