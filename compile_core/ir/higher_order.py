"""What calls with functions for arguments become in a captured graph.

Each is a node of its own whose arguments are tensors and objects that the graph holds: classes, bodies (graphs of their
own), options. Called on real tensors it does what the user's call does, autograd included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from gradsplit.compile_core.torch_facts.higher_order_operators import tag_activation_checkpoint

# In the metadata of autograd's node of a tensor that got a hook.
HOOKED = "gradsplit.hooked"

BodyFunction = Callable[..., tuple[torch.Tensor, ...]]


def autograd_function(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """``cls.apply(*args)``."""
    return cls.apply(*args)


def hook_gradient(tensor: torch.Tensor, body: BodyFunction, *lifted: torch.Tensor) -> None:
    """``tensor.register_hook`` of a function of the gradient that reads the lifted tensors."""
    tensor.register_hook(lambda gradient: body(gradient, *lifted)[0])
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[HOOKED] = True


@dataclass(frozen=True)
class CheckpointOptions:
    """The keywords of ``torch.utils.checkpoint.checkpoint``; of the tensors, ``num_arguments`` are its arguments."""

    keywords: dict[str, Any]
    num_arguments: int

    @property
    def use_reentrant(self) -> bool:
        return bool(self.keywords.get("use_reentrant"))


def checkpoint(
    body: BodyFunction, options: CheckpointOptions, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run ``body`` without keeping what it computes: the backward computes it again."""
    arguments, lifted = tensors[: options.num_arguments], tensors[options.num_arguments :]
    # Only what is passed as an argument counts as an input of a reentrant checkpoint.
    return torch_checkpoint.checkpoint(lambda *passed: body(*passed, *lifted), *arguments, **options.keywords)


def checkpoint_once(
    body: BodyFunction, options: CheckpointOptions, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``checkpoint`` for one run that is traced or only looked at: the same results, with nothing computed twice."""
    arguments = tensors[: options.num_arguments]
    watched = arguments if options.use_reentrant else tensors
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in watched)
    if options.use_reentrant and not tracked:
        with torch.no_grad():
            return body(*tensors)
    results = body(*tensors)
    if not options.use_reentrant:
        return results
    passed = {id(tensor) for tensor in tensors}
    return tuple(result.view_as(result) if id(result) in passed else result for result in results)


# The targets of checkpoints in captured graphs -> the position of the body's first argument among the node's.
CHECKPOINTS: Mapping[Any, int] = {checkpoint: 2, tag_activation_checkpoint: 1}
