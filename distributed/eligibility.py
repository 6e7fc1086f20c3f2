"""Where the in-graph way does not apply: features of stock DDP that need its own reducer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# How each backend is told to average: by the operator, or by scaling before a sum.
_REDUCING_BACKENDS = ("gloo", "nccl")


def reason_for_reducer(ddp: DistributedDataParallel) -> str:
    """Why the module's gradients must go through stock DDP's reducer, or "" if they need not."""
    checks = (
        (ddp.find_unused_parameters, "find_unused_parameters=True"),
        (ddp.static_graph, "static_graph=True"),
        (bool(ddp._comm_hooks), "a communication hook is registered"),
        (hasattr(ddp, "buffer_hook"), "a buffer hook is registered"),
        (ddp.mixed_precision is not None, "DDP's own mixed precision is on"),
        (bool(ddp._delay_all_reduce_params), "some all-reduces are delayed"),
        (ddp._use_python_reducer, "torch's Python reducer is on"),
        (_has_sparse_gradients(ddp.module), "a module has sparse gradients"),
    )
    for found, reason in checks:
        if found:
            return reason
    backend = dist.get_backend(ddp.process_group)
    if backend not in _REDUCING_BACKENDS:
        return f"the process group's backend is {backend}, not one of {', '.join(_REDUCING_BACKENDS)}"
    return ""


def reason_of_call(ddp: DistributedDataParallel) -> str:
    """Why this one call must go through stock DDP's reducer, on all ranks alike, or ""."""
    # Ranks that have no more inputs take part in the collectives of the reducer's buckets.
    return "the call is inside a join() context" if ddp._join_config.enable else ""


def _has_sparse_gradients(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return any(isinstance(part, kinds) and part.sparse for part in module.modules())
