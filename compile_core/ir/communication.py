"""Whether a captured graph may exchange data with other ranks.

Such a graph cannot run a second time on one rank alone, as where it has raised there: the others would answer with what
they send next, and each rank would compute with other numbers, or wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.ir.wrapper_edges import has_wrappers

NOT_AGAIN = (
    "Raised in a graph that exchanges data with other ranks. It was not run again as plain Python, which would tell "
    "the line, since the others would answer with what they send next."
)

# Of operators that compute; nothing is known of a user's.
_COMPUTING = frozenset(["aten", "prims", "prim", "gradsplit", "torchvision", "quantized"])


def may_communicate(graph: torch.fx.GraphModule) -> bool:
    """True also where an operator of a user's may, or the class of a wrapper: only if there are other ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if has_wrappers(graph):
        return True
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(_namespace(node.target) not in _COMPUTING for module in modules for node in module.graph.nodes)


def _namespace(target: Any) -> str:
    """An operator's; that of torch's own functions is ``aten``."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return "aten"
