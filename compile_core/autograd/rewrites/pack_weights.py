"""Convolutions on a CPU read weights that were packed once (``ir.packed_weights``), as far as these stay the same.

oneDNN's kernels could do a ReLU behind a convolution, too, but make 0 of what is no number.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call
from gradsplit.compile_core.autograd.rewrites.fold_parameters import parameters_read
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.packed_weights import (
    CONVOLUTION,
    PACKED_WEIGHT,
    has_bfloat16_kernels,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten


def pack_weights(joint: JointGraph, held: Set[int]) -> JointGraph:
    """The joint graph with such calls; changes its module.

    Args:
        held: positions of the primals that stay as they are between calls.
    """
    if CONVOLUTION is None or joint.tangents:
        return joint
    graph = joint.module.graph
    constant = parameters_read(joint, held)
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if node.args[1] in constant and _is_packable(node):
            _pack(graph, node)
    joint.module.recompile()
    return joint


def _is_packable(node: Node) -> bool:
    value = node.meta["val"]
    is_transposed = node.args[6]
    return (
        value.device.type == "cpu"
        and (value.dtype == torch.float32 or (value.dtype == torch.bfloat16 and has_bfloat16_kernels()))
        and value.dim() == 4
        and not is_transposed
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def _pack(graph: Graph, node: Node) -> None:
    image, weight, bias, *geometry, _, groups = node.args
    spec = TensorSpec.of(image.meta["val"])  # type: ignore[union-attr]
    stride, padding, dilation, _ = geometry
    window = (padding, stride, dilation, groups)
    with graph.inserting_before(node):
        packed = add_call(
            graph, node, PACKED_WEIGHT, weight, *window, None if spec.is_open else list(spec.shape)
        )
        call = add_call(graph, node, CONVOLUTION, image, packed, bias, *window, "none", [], "")
    node.replace_all_uses_with(call)
    graph.erase_node(node)
