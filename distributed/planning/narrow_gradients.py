"""Gradients of float32 parameters that are exact in 16 bits, and are stored and sent as such.

Under autocast a product computes its weight's gradient in 16 bits, and the last that the backward does with it is a
cast to the parameter's dtype. That can wait until the gradient is averaged: the cast costs no pass over memory then,
and the link carries half as much. The mean is the same to the last bit, other than with a compression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from compile_core.autograd.operators.kinds import packet
from compile_core.ir.lazy_modules import lazy_module
from compile_core.ir.regions import graph_results
from distributed.collectives.landed_mean import NARROW_TYPES


def with_narrow_gradients(
    module: GraphModule, gradients: Mapping[str, int], accept: Callable[[str, torch.dtype], bool]
) -> tuple[GraphModule, dict[str, torch.dtype]]:
    """The backward without the casts that its gradients may go without.

    Args:
        module: the backward graph.
        gradients: for each parameter whose gradient is stored in a bucket, the position of it among the results.
        accept: whether the gradient of this parameter may be stored in this dtype.

    Returns:
        A graph with as many results, and the dtypes of those that are narrow now, by parameter.
    """
    results = graph_results(module)
    cast: dict[int, Node] = {}
    narrow: dict[str, torch.dtype] = {}
    for name, position in gradients.items():
        source = _cast_from(results[position])
        if source is not None and accept(name, source.meta["val"].dtype):
            cast[position] = source
            narrow[name] = source.meta["val"].dtype
    if not narrow:
        return module, narrow
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copies)
    returned = [cast.get(position, node) for position, node in enumerate(results)]
    graph.output([None if node is None else copies[node] for node in returned])
    for position in cast:
        unread = copies[results[position]]  # type: ignore[index]
        if not unread.users:
            graph.erase_node(unread)
    return lazy_module(module, graph), narrow


def _cast_from(node: Node | None) -> Node | None:
    """What this node casts from 16 bits to float32."""
    if node is None or packet(node) is not torch.ops.aten._to_copy:
        return None
    (source,) = node.all_input_nodes
    before, behind = source.meta["val"], node.meta["val"]
    casts = before.dtype in NARROW_TYPES and behind.dtype == torch.float32
    return source if casts and before.device == behind.device else None
