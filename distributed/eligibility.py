"""Where the in-graph way does not apply: features of stock DDP that need its own reducer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compile_core.hooked_modules import has_hooks

# How each backend is told to average: by the operator, or by scaling before a sum.
_REDUCING_BACKENDS = ("gloo", "nccl")


def reason_for_reducer(ddp: DistributedDataParallel, parameters: Iterable[torch.nn.Parameter]) -> str | None:
    """Why the module's gradients must go through stock DDP's reducer, or ``None`` if they need not.

    ``parameters`` are those whose gradients the module reduces. Everything that DDP's constructor or a method of it can
    switch on later is looked at, so it is asked at every call.
    """
    checks = (
        (ddp.find_unused_parameters, "find_unused_parameters=True"),
        (ddp.static_graph, "static_graph=True"),
        (bool(ddp._comm_hooks), "a communication hook is registered"),
        (hasattr(ddp, "buffer_hook"), "a buffer hook is registered"),
        (ddp.mixed_precision is not None, "DDP's own mixed precision is on"),
        (ddp._join_config.enable, "the call is inside a join() context"),
        (bool(ddp._delay_all_reduce_params), "some all-reduces are delayed"),
        (ddp._use_python_reducer, "torch's Python reducer is on"),
        (
            bool(ddp._forward_hooks or ddp._forward_pre_hooks),
            "forward hooks are registered on the DDP module",
        ),
        (
            bool(ddp._backward_hooks or ddp._backward_pre_hooks),
            "backward hooks are registered on the DDP module",
        ),
        (has_hooks(ddp.module), "hooks are registered on the wrapped module"),
    )
    for found, reason in checks:
        if found:
            return reason
    backend = dist.get_backend(ddp.process_group)
    if backend not in _REDUCING_BACKENDS:
        return f"the process group's backend is {backend}, not one of {', '.join(_REDUCING_BACKENDS)}"
    for parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "hooks are registered on a parameter"
    return None
