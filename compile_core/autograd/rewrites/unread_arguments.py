"""Arguments of which a backward's operator asks only how they lie in memory are memory that nobody wrote.

The gradient of a mean over windows is a share of the gradient that arrives; the operator takes what the means are of
for its sizes alone. Given that, the forward would keep it, although nothing reads it.

Limits: arguments of open sizes stay; so do small ones, and what others see of the graph, which is in memory anyway and
which plain PyTorch watches for changes.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.autograd.operators.costs import result_bytes
from gradsplit.compile_core.autograd.operators.graph_nodes import add_call, memory_of
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten

# Each takes it second.
_TAKE_SIZES = frozenset(
    {
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten._adaptive_avg_pool3d_backward.default,
    }
)
_DEVICES = ("cpu", "cuda")
# The memory of smaller ones is not worth the call that allocates it.
_LEAST_BYTES = 4 << 20


def leave_unread_out(joint: JointGraph) -> JointGraph:
    """The joint graph; changes its module."""
    (output,) = joint.module.graph.find_nodes(op="output")
    seen = {memory_of(result) for result in output.all_input_nodes}
    for node in [*joint.module.graph.nodes]:
        if node.target in _TAKE_SIZES:
            _give_sizes(node, seen)
    joint.module.recompile()
    return joint


def _give_sizes(node: Node, seen: Set[Node]) -> None:
    function: Any = node.target
    source: Any = node.args[1]
    gradient, settings = node.args[0], node.args[2:]
    value, memory = source.meta["val"], memory_of(source)
    is_large = not TensorSpec.of(value).is_open and result_bytes(source) >= _LEAST_BYTES
    if not is_large or value.device.type not in _DEVICES or memory.op == "placeholder" or memory in seen:
        return
    with node.graph.inserting_before(node), value.fake_mode:
        like = TensorSpec.of(torch.empty_like(value))
        kind: Any = {"dtype": like.dtype, "device": like.device}
        sizes = add_call(node.graph, node, aten.empty_strided.default, [*like.shape], [*like.stride], **kind)
        other = add_call(node.graph, node, function, gradient, sizes, *settings)
    # Where it decides on the result's layout, it must be the same.
    if TensorSpec.of(other.meta["val"]) == TensorSpec.of(node.meta["val"]):
        node.args = (gradient, sizes, *settings)
    node.graph.erase_node(other)
    if not sizes.users:
        node.graph.erase_node(sizes)
