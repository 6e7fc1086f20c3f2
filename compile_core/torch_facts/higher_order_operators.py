"""Operators that take functions: branches, loops and checkpointed regions, as nodes of a graph."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.torch_facts.private_parts import PROGRAMS_RUN_PLAIN, private

cond = private("torch._higher_order_ops.cond:cond", "torch.cond in programs", PROGRAMS_RUN_PLAIN)
cond_operator = private("torch._higher_order_ops.cond:cond_op", "torch.cond in programs", PROGRAMS_RUN_PLAIN)
while_loop = private(
    "torch._higher_order_ops.while_loop:while_loop", "torch.while_loop in programs", PROGRAMS_RUN_PLAIN
)
while_loop_operator = private(
    "torch._higher_order_ops.while_loop:while_loop_op", "torch.while_loop in programs", PROGRAMS_RUN_PLAIN
)
tag_activation_checkpoint = private(
    "torch._higher_order_ops.wrap:tag_activation_checkpoint",
    "checkpointed regions in programs",
    PROGRAMS_RUN_PLAIN,
)
call_of_region = private(
    "torch._higher_order_ops.invoke_subgraph:invoke_subgraph_placeholder",
    "torch.compiler.nested_compile_region in programs",
    PROGRAMS_RUN_PLAIN,
)
call_operator = private(
    "torch._ops:HigherOrderOperator.__call__",
    "other operators that take functions, in programs",
    PROGRAMS_RUN_PLAIN,
)
associative_scan = private(
    "torch._higher_order_ops.associative_scan:associative_scan_op",
    "torch.associative_scan of tensors that require gradients, in programs",
    PROGRAMS_RUN_PLAIN,
)
flex_attention_operator = private(
    "torch._higher_order_ops.flex_attention:flex_attention", "flex_attention in programs", PROGRAMS_RUN_PLAIN
)
vmap_over_scores = private(
    "torch.nn.attention.flex_attention:_vmap_for_bhqkv", "flex_attention in programs", PROGRAMS_RUN_PLAIN
)
_kernel_key = private(
    "torch._C:DispatchKey.CompositeExplicitAutograd",
    "other operators that take functions, in programs",
    PROGRAMS_RUN_PLAIN,
)


def python_kernel(operator: Any) -> Any:
    """The Python function by which an operator that takes functions computes without gradients, None if it has none."""
    return getattr(operator, "py_kernels", {}).get(_kernel_key)
