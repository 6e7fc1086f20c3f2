"""Where the in-graph way does not apply: features of stock DDP that need its own reducer."""

from __future__ import annotations

import gc
from functools import cache

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.torch_facts.process_groups import run_ddp_forward
from gradsplit.distributed.ddp_module import process_group
from gradsplit.distributed.group_backend import backend_of
from gradsplit.distributed.reducer.parked_reducer import has_hook_in_c
from gradsplit.distributed.reducer.wrapped_parameters import looks_for_unused, reduced_parameters

# How each backend averages: by the operator, or by scaling before a sum.
_REDUCING_BACKENDS = ("gloo", "nccl")
# Methods that a call consists of.
_STEPS = ("forward", "_run_ddp_forward", "_pre_forward", "_post_forward", "_sync_buffers")


def reason_for_reducer(ddp: DistributedDataParallel) -> str:
    """Why the module's gradients must go through stock DDP's reducer, or "" if they need not."""
    checks = (
        (looks_for_unused(ddp), "find_unused_parameters=True"),
        (ddp.mixed_precision is not None, "DDP's own mixed precision is on"),
        (bool(ddp._delay_all_reduce_params), "some all-reduces are delayed"),
        (ddp._use_python_reducer, "torch's Python reducer is on"),
        (_has_other_steps(type(ddp)), f"{type(ddp).__name__} does something else in a call"),
        (_has_sparse_gradients(ddp.module), "a module has sparse gradients"),
        (_has_optimizers_in_backward(ddp.module), "optimizers step in the backward"),
    )
    for found, reason in checks:
        if found:
            return reason
    if reason := _reason_switched_on(ddp):
        return reason
    backend = backend_of(process_group(ddp), ddp.device)
    if backend not in _REDUCING_BACKENDS:
        known = ", ".join(_REDUCING_BACKENDS)
        return f"the process group's backend is {backend or 'none for this device'}, not one of {known}"
    return ""


def reason_of_call(ddp: DistributedDataParallel) -> str:
    """Why this one call must go through stock DDP's reducer, on all ranks alike, or ""."""
    return "the call is inside a join() context" if is_joining(ddp) else _reason_switched_on(ddp)


class Wrappings:
    """Counts DDP modules, compiled or not, as they are made: torch keeps no list of them.

    Attributes:
        count: since counting began.
    """

    count = 0

    @classmethod
    @cache
    def begin(cls) -> None:
        register_module_module_registration_hook(cls._registered)

    @classmethod
    def _registered(cls, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if name == "module" and isinstance(parent, DistributedDataParallel):
            cls.count += 1


def shares_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether another DDP module, compiled or not, has parameters that this one reduces, as an encoder under two heads.

    A backward that reaches both gives each reducer what autograd has accumulated from both. Buckets of one module would
    have that module's part alone.
    """
    if not _share_parameters(ddp):
        return False
    # One that the program has let go of may lie in a cycle.
    gc.collect()
    return _share_parameters(ddp)


def _share_parameters(ddp: DistributedDataParallel) -> bool:
    # A compiled module has the attributes of the one that was compiled.
    others = [vars(module) for module in _ddp_modules() if vars(module) is not vars(ddp)]
    wrapped = [attributes["_modules"]["module"] for attributes in others if attributes.get("_modules")]
    theirs = {parameter for module in wrapped for parameter in module.parameters()}
    if theirs.isdisjoint(ddp.module.parameters()):
        return False
    return not theirs.isdisjoint(reduced_parameters(ddp).values())


def _ddp_modules() -> list[DistributedDataParallel]:
    """Those of this process. Nobody lists those that are not compiled, but each refers to its class."""
    kinds: set[type[DistributedDataParallel]] = set()
    waiting = [DistributedDataParallel]
    while waiting:
        kinds.add(kind := waiting.pop())
        waiting += kind.__subclasses__()
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ranks may have no inputs left, which take part in the collectives of the reducer's buckets then."""
    return ddp._join_config.enable


def _reason_switched_on(ddp: DistributedDataParallel) -> str:
    """What the program can ask of a module after its first call, too."""
    # For its own mixed precision DDP registers one.
    if (ddp._comm_hooks and ddp.mixed_precision is None) or has_hook_in_c(ddp):
        return "a communication hook is registered"
    if hasattr(ddp, "buffer_hook"):
        return "a buffer hook is registered"
    if "forward" in vars(ddp):
        return "its forward was replaced"
    return ""


def has_own_forward(ddp: DistributedDataParallel) -> bool:
    """Whether a call is another than stock DDP's."""
    kind = type(ddp)
    return (
        kind.forward is not DistributedDataParallel.forward
        or kind._run_ddp_forward is not run_ddp_forward
        or "forward" in vars(ddp)
    )


def _has_other_steps(kind: type[DistributedDataParallel]) -> bool:
    """Whether a subclass has a say in what a call does."""
    return any(getattr(kind, name) is not getattr(DistributedDataParallel, name) for name in _STEPS)


def _has_sparse_gradients(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return any(isinstance(part, kinds) and part.sparse for part in module.modules())


def _has_optimizers_in_backward(module: torch.nn.Module) -> bool:
    """Stock DDP steps them itself when a bucket is reduced; they hang on nodes that compiled backwards go round."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters())
