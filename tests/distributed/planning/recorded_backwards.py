"""Backward graphs for planning: large, as they would be for a GPU, and never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from tests.autograd.compare_with_eager import captured
from tests.lowering.move_graph import on_gpu

Shape = Sequence[int]


def recorded_graph(program: Callable[..., Any], **shapes: Shape) -> PartitionedGraph:
    """The forward and the backward of a program of tensors, given by name and shape."""
    with FakeTensorMode():
        examples = [torch.empty(*shape, requires_grad=True) for shape in shapes.values()]
    graph = partition(trace_joint(captured(program), examples, decomposition_table("cuda")))
    assert graph.backward is not None
    on_gpu(graph.backward)
    return graph


def recorded(program: Callable[..., Any], **shapes: Shape) -> tuple[GraphModule, dict[str, int]]:
    """The backward of a program of parameters, and where each one's gradient stands."""
    graph = recorded_graph(program, **shapes)
    assert graph.backward is not None
    names = list(shapes)
    return graph.backward, {names[k]: place for place, k in enumerate(graph.signature.gradient_inputs)}
