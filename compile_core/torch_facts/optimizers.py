"""What torch's optimizers do around the arithmetic of a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsplit.compile_core.torch_facts.private_parts import PROGRAMS_RUN_PLAIN, private

_HOOKS = "hooks of all optimizers"
global_pre_hooks = private("torch.optim.optimizer:_global_optimizer_pre_hooks", _HOOKS, PROGRAMS_RUN_PLAIN)
global_post_hooks = private("torch.optim.optimizer:_global_optimizer_post_hooks", _HOOKS, PROGRAMS_RUN_PLAIN)
use_grad_for_differentiable = private(
    "torch.optim.optimizer:_use_grad_for_differentiable",
    "capturing torch's optimizers",
    PROGRAMS_RUN_PLAIN,
    lambda function: function,
)
group_tensors = private(
    "torch.optim.optimizer:Optimizer._group_tensors_by_device_and_dtype",
    "capturing torch's foreach optimizers",
)


class _Steps:
    """Whether any optimizer has made a step, and how often that was found out."""

    were_made = False
    rounds = 0


_steps = _Steps()


@cache
def hear_of_steps() -> None:
    """From now on steps are noted, also those that count no change of the parameters, as fused ones."""
    register_optimizer_step_post_hook(note_step)


def note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A store and nothing else, which compiled steps can do, too."""
    _steps.were_made = True


def rounds_of_steps() -> int:
    """Another number than before if any optimizer has made a step since."""
    if _steps.were_made:
        _steps.were_made = False
        _steps.rounds += 1
    return _steps.rounds
