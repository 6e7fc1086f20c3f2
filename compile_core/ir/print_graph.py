"""Prints graphs and schedules with stable names, for golden tests and stage dumps."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from compile_core.ir.numbers import SYMBOLIC_NUMBERS
from compile_core.ir.schedule import Compute, Schedule, StartCollective
from compile_core.ir.tensor_spec import TensorSpec


def print_graph(module: GraphModule) -> str:
    """One line a node: name, what it holds, operator and arguments."""
    return "\n".join(_print_node(node) for node in module.graph.nodes) + "\n"


def print_schedule(schedule: Schedule) -> str:
    """The steps in order, each region with its graph."""
    lines = [f"schedule {schedule.name}({', '.join(schedule.inputs)})"]
    for step in schedule.steps:
        if isinstance(step, Compute):
            lines.append(f"compute {step.name}({', '.join(step.inputs)}) -> {', '.join(step.outputs)}")
            lines += [f"    store {value} in {where}" for value, where in step.destinations.items()]
            lines += ["    " + line for line in print_graph(step.module).splitlines()]
        elif isinstance(step, StartCollective):
            lines.append(f"start bucket {step.bucket}")
        else:
            lines.append(f"wait bucket {step.bucket}")
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
