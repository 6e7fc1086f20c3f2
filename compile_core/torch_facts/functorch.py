"""The transforms of ``torch.func`` that are active around a call."""

from __future__ import annotations

from gradsplit.compile_core.torch_facts.private_parts import private

is_batched_by_autograd = private(
    "torch._C._functorch:is_legacy_batchedtensor", "gradients that arrive in batches (is_grads_batched)"
)
top_transform = private("torch._C._functorch:peek_interpreter_stack", "calls inside torch.func's transforms")
is_wrapped_by_transform = private(
    "torch._C._functorch:is_functorch_wrapped_tensor", "calls inside torch.func's transforms"
)
are_transforms_active = private(
    "torch._C:_are_functorch_transforms_active", "calls inside torch.func's transforms"
)
