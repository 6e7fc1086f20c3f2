"""A sum of a tensor and of what was added up in zeros is added up in the tensor.

GPT-2 uses one matrix as its embedding and as its head: the gradient is a product's, plus rows that were added to zeros
where tokens say. Added to the product's instead, neither zeros nor the sum go through memory.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.region_marks import mark_of

aten = torch.ops.aten

_ZEROS = (aten.full.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def join_scatter_sums(graph: Graph) -> None:
    """Joins such sums; what nobody needs any longer stays in the graph."""
    for total in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if total.kwargs or not all(isinstance(term, Node) for term in total.args):
            continue
        first, second = total.all_input_nodes if len(total.all_input_nodes) == 2 else (total, total)
        for tensor, scattered in ((first, second), (second, first)):
            # What is scattered in a checkpoint is not to be read from outside of it.
            if not _adds_to_zeros(scattered) or mark_of(scattered) != mark_of(total):
                continue
            # Asked last: open sizes that are compared become conditions.
            if _is_like(tensor, total) and _is_like(scattered, total):
                with graph.inserting_before(total):
                    joined = graph.call_function(
                        aten.index_add.default, (tensor, *scattered.args[1:]), dict(scattered.kwargs)
                    )
                joined.meta = dict(total.meta)
                total.replace_all_uses_with(joined)
                graph.erase_node(total)
                graph.erase_node(scattered)
                break


def _adds_to_zeros(node: Node) -> bool:
    if node.target is not aten.index_add.default or len(node.users) != 1:
        return False
    start = node.args[0]
    if not isinstance(start, Node) or start.target not in _ZEROS:
        return False
    return start.target is not aten.full.default or bool(start.args[1] == 0)


def _is_like(node: Node, other: Node) -> bool:
    value, wanted = node.meta.get("val"), other.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    return tuple(value.shape) == tuple(wanted.shape) and value.dtype is wanted.dtype
