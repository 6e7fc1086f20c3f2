"""What a report says of the graphs, schedules, loops and kernels that stages hand on: as values that JSON can say."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.errors import CodeLocation
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, Step
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.ir.user_lines import user_line


def describe(value: Any) -> dict[str, Any]:
    """Nodes with the captured nodes and lines that they come from; regions with their nodes and the gradients that they
    store; steps with the nodes that they compute; texts of kernels. Nothing of another type."""
    if isinstance(value, JointGraph):
        return describe(value.module)
    if isinstance(value, GraphModule):
        return {"nodes": [_node(node) for node in value.graph.nodes if node.op != "output"]}
    if isinstance(value, Schedule):
        return {
            "regions": [
                {
                    "name": compute.name,
                    "nodes": [node.name for node in compute.module.graph.nodes if node.op == "call_function"],
                    "stores": list(compute.destinations.values()),
                }
                for compute in value.computes
            ]
        }
    if isinstance(value, LoopProgram):
        return {"steps": [_step(step, value.buffers) for step in value.steps]}
    if isinstance(value, list) and value and isinstance(value[0], KernelSource):
        return {"kernels": [{"name": one.name, "language": one.language, "text": one.text} for one in value]}
    return {}


def describe_place(place: CodeLocation | None) -> dict[str, Any] | None:
    """A line of the user's."""
    if place is None:
        return None
    return {"file": place.filename, "line": place.line, "function": place.function, "text": place.text}


def describe_code(code: CodeType) -> dict[str, Any]:
    """Where a function begins."""
    return {"file": code.co_filename, "line": code.co_firstlineno}


def _node(node: Node) -> dict[str, Any]:
    value = node.meta.get("val", node.meta.get("example_value"))
    return {
        "name": node.name,
        "op": node.op,
        "target": str(getattr(node.target, "__name__", node.target)),
        "reads": [source.name for source in node.all_input_nodes],
        "shape": str(TensorSpec.of(value)) if isinstance(value, torch.Tensor) else "",
        "captured": node.meta.get("captured", ""),
        "place": describe_place(user_line(node)),
    }


def _step(step: Step, buffers: Mapping[str, TensorSpec]) -> dict[str, Any]:
    is_call = isinstance(step, ExternCall)
    return {
        "name": str(step.target) if is_call else step.name,
        "kind": "call" if is_call else "kernel",
        "nodes": list(step.origins),
        "read_bytes": sum(_bytes(buffers[name]) for name in reads(step) if name in buffers),
        "written_bytes": sum(_bytes(buffers[name]) for name in writes(step) if name in buffers),
    }


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize
