"""Checkpoints of the program: what the backward computes again because the user said so.

A checkpoint node of a captured graph would, traced as it is, record its body twice. Instead its body is traced once,
and every operator of it carries a ``RegionMark``, from which the partition takes its orders (``recompute_orders``). A
policy of selective checkpointing is asked about each operator above decompositions, as eager asks it, but below
functionalization: of an operator in place it sees the form that returns a new tensor. Its answer becomes part of the
mark. Of nested checkpoints the outermost decides: what it computes again, it computes again whole.

Random numbers are drawn once and saved, so that the backward sees the very same.

Limits, each an ``Unsupported``: a region that changes a tensor in place, which would change once more at the
recomputation; one that draws random numbers but does not keep the generator's state, whose recomputation sees others;
contexts that are not those of a policy; values that a policy sends to another device.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
)

from gradsplit.compile_core.autograd.operators.region_marks import RegionMark, is_marking, mark_of, marked
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir import higher_order
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.thread_state import CachingDispatchMode

_numbers = itertools.count()

Policy = Callable[..., CheckpointPolicy | bool]


def check_random_state(module: GraphModule) -> None:
    """Refuses a traced program with a region whose recomputation would draw random numbers of its own."""
    for node in module.graph.nodes:
        mark = mark_of(node)
        if mark is not None and not mark.keeps_random_state and is_random(node):
            raise Unsupported(
                "checkpoint-random",
                f"a checkpoint with preserve_rng_state=False draws random numbers ({node.target})",
                "leave preserve_rng_state at True",
            )


def run_marked(body: Callable[..., Any], options: Any, *tensors: Any) -> Any:
    """A checkpoint that runs its body once and marks the operators of it.

    The marks appear where the program is traced under ``torch.fx.traceback.preserve_node_meta``.
    """
    if is_marking():
        return higher_order.checkpoint_once(body, options, *tensors)
    mark = RegionMark(next(_numbers), options.keywords.get("preserve_rng_state", True))
    policy = _policy_of(options.keywords.get("context_fn"))
    tensors_read = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    versions = [tensor._version for tensor in tensors_read]
    with ExitStack() as stack:
        stack.enter_context(marked(mark))
        if policy is not None:
            stack.enter_context(_AskPolicy(mark, policy))
        results = higher_order.checkpoint_once(body, options, *tensors)
    if [tensor._version for tensor in tensors_read] != versions:
        raise Unsupported("checkpoint-mutation", "a checkpointed function changes a tensor in place")
    return results


def run_tagged(body: Any, *arguments: Any, **keywords: Any) -> Any:
    """The same for a checkpoint as torch's own front end writes it."""
    keywords["context_fn"] = body.meta.get("_checkpoint_context_fn")
    return run_marked(body, higher_order.CheckpointOptions(keywords, len(arguments)), *arguments)


def _policy_of(context_fn: Callable[[], tuple[Any, Any]] | None) -> Policy | None:
    """The policy in the contexts of a checkpoint; ``None`` where these do nothing."""
    if context_fn is None:
        return None
    context, _ = context_fn()
    if type(context) is CachingDispatchMode:
        return context.policy_fn
    if type(context) is nullcontext:
        return None
    raise Unsupported(
        "checkpoint-context",
        f"a checkpoint runs its function under {type(context).__qualname__}",
        "only contexts of create_selective_checkpoint_contexts are compiled",
    )


class _AskPolicy(TorchDispatchMode):
    """Asks a policy about each operator of a region, and marks what the operator is traced into with the answer."""

    def __init__(self, region: RegionMark, policy: Policy) -> None:
        super().__init__()
        self.region = region
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        mark = copy.copy(self.region)
        mark.operator = next(_numbers)
        with marked(mark):
            result = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result
        answer = self.policy(context, func, *args, **kwargs)
        if answer is True:
            answer = CheckpointPolicy.MUST_SAVE
        elif not isinstance(answer, CheckpointPolicy):
            answer = CheckpointPolicy.PREFER_RECOMPUTE
        if answer.name.endswith("OFFLOAD"):
            raise Unsupported("checkpoint-offload", f"a checkpoint's policy offloads the result of {func}")
        mark.policy = answer
        return result
