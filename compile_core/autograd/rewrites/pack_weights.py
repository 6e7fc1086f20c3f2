"""Convolutions and products on a CPU read weights that were packed once, as far as these stay the same.

See ``ir.packed_weights``. Products in float32 take as long with either layout.

oneDNN's kernels could do a ReLU behind a convolution, too, but make 0 of what is no number.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call
from gradsplit.compile_core.autograd.rewrites.fold_parameters import is_small_enough, parameters_read
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.packed_weights import (
    CONVOLUTION,
    LINEAR,
    PACKED_MATRIX,
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
    kept = {node for node in constant if constant[node] and is_small_enough(node, constant)}
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if node.args[1] in kept and _is_packable_convolution(node):
            _pack_convolution(graph, node)
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[-1] in kept and _is_packable_product(node):
                _pack_product(graph, node)
    joint.module.recompile()
    return joint


def _is_packable_convolution(node: Node) -> bool:
    value = node.meta["val"]
    is_transposed = node.args[6]
    return (
        value.device.type == "cpu"
        and (value.dtype == torch.float32 or (value.dtype == torch.bfloat16 and has_bfloat16_kernels()))
        and value.dim() == 4
        and not is_transposed
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def _pack_convolution(graph: Graph, node: Node) -> None:
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


def _is_packable_product(node: Node) -> bool:
    value = node.meta["val"]
    bias = node.args[0] if len(node.args) == 3 else None
    return (
        value.device.type == "cpu"
        and value.dtype == torch.bfloat16
        and has_bfloat16_kernels()
        and not node.kwargs
        and (bias is None or bias.meta["val"].shape == value.shape[1:])  # type: ignore[union-attr]
        and 0 not in node.args[-1].meta["val"].shape  # type: ignore[union-attr]
    )


def _pack_product(graph: Graph, node: Node) -> None:
    *bias, left, right = node.args
    rows = left.meta["val"].shape[0]  # type: ignore[union-attr]
    with graph.inserting_before(node):
        weight = add_call(graph, node, aten.t.default, right)
        packed = add_call(graph, node, PACKED_MATRIX, weight, rows if isinstance(rows, int) else None)
        call = add_call(graph, node, LINEAR, left, packed, bias[0] if bias else None, "none", [], "")
    node.replace_all_uses_with(call)
    graph.erase_node(node)
