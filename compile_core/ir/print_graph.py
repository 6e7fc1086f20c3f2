"""Prints graphs and schedules with stable names, for golden tests and stage dumps."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def print_graph(module: GraphModule) -> str:
    """One line a node: name, what it holds, operator and arguments."""
    return "\n".join(_print_node(node) for node in module.graph.nodes) + "\n"


def print_joint(joint: JointGraph) -> str:
    """The joint graph, after what is computed apart from its calls."""
    if joint.folded is None:
        return print_graph(joint.module)
    values = joint.primals[len(joint.primals) - len(graph_results(joint.folded.module)) :]
    return f"{print_graph(joint.folded.module)}once: {', '.join(values)}\n{print_graph(joint.module)}"


def print_schedule(schedule: Schedule) -> str:
    """The regions in order, each with its graph."""
    lines = [f"schedule {schedule.name}({', '.join(schedule.inputs)})"]
    for compute in schedule.computes:
        lines.append(f"compute {compute.name}({', '.join(compute.inputs)}) -> {', '.join(compute.outputs)}")
        lines += [f"    store {value} in {where}" for value, where in compute.destinations.items()]
        lines += ["    " + line for line in print_graph(compute.module).splitlines()]
    lines.append(f"return {', '.join(map(str, schedule.outputs))}")
    return "\n".join(lines) + "\n"


def _print_node(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = node.meta.get("val", node.meta.get("example_value"))
    held = f": {TensorSpec.of(value)}" if isinstance(value, torch.Tensor) else ""
    if isinstance(value, SYMBOLIC_NUMBERS):
        held = f": {value}"
    if node.op == "placeholder":
        return f"input {node.name}{held}"
    arguments = [str(argument) for argument in node.args]
    arguments += [f"{name}={argument}" for name, argument in node.kwargs.items()]
    target = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    )
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target).removeprefix("aten.")
    return f"{node.name}{held} = {target}({', '.join(arguments)})"
