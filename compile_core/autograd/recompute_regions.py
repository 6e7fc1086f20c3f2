"""Checkpoints of the program: what the backward computes again because the user said so.

A checkpoint node of a captured graph would, traced as it is, record its body twice. Instead its body is traced once,
and every operator of it carries the region's number, from which the partition takes its orders: what only the region
itself reads is not saved. Random numbers are drawn once and saved, so that the backward sees the very same.

Limit: a region that changes a tensor in place would change it once more at the recomputation; it is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx import traceback as node_metadata

from compile_core.errors import Unsupported
from compile_core.ir import higher_order
from compile_core.ir.random_operators import is_random

_REGION = "recompute_region"
_numbers = itertools.count()


def mark_regions(module: GraphModule) -> GraphModule:
    """The program with checkpoints that run their body once, marking its operators; ``module`` stays as it is.

    The marks appear where the program is traced under ``torch.fx.traceback.preserve_node_meta``.
    """
    if not any(node.target is higher_order.checkpoint for node in module.graph.nodes):
        return module
    marked = copy.copy(module)
    marked.graph = copy.deepcopy(module.graph)
    for node in marked.graph.nodes:
        if node.target is higher_order.checkpoint:
            node.target = _run_marked
    marked.recompile()
    return marked


def region_of(node: Node) -> int | None:
    """The region that an operator of the traced program belongs to."""
    return node.meta.get("custom", {}).get(_REGION)


def is_recomputed(node: Node, in_forward: Set[Node]) -> bool:
    """Whether a value may not be saved: it lies inside a region, and of the forward only the region reads it."""
    region = region_of(node)
    if region is None or node not in in_forward or is_random(node):
        return False
    return all(
        user.op != "output" and (user not in in_forward or region_of(user) == region) for user in node.users
    )


def _run_marked(body: Callable[..., Any], options: Any, *tensors: torch.Tensor) -> Any:
    if options.keywords.get("context_fn") is not None:
        raise Unsupported("selective-checkpoint", "a checkpoint with a policy of its own (context_fn)")
    versions = [tensor._version for tensor in tensors]
    with node_metadata.annotate({_REGION: next(_numbers)}):
        inner = mark_regions(body) if isinstance(body, GraphModule) else body
        results = higher_order.checkpoint_once(inner, options, *tensors)
    if [tensor._version for tensor in tensors] != versions:
        raise Unsupported("checkpoint-mutation", "a checkpointed function changes a tensor in place")
    return results
