"""What torch's optimizers do around the arithmetic of a step."""

from __future__ import annotations

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
