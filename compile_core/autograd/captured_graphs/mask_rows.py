"""Masks of attention in row-major order, where a fused kernel takes them so and not as they lie.

The bias of relative positions comes out of an embedding with the heads innermost in memory, and torch then has all
scores in memory, in float32. A copy of the mask costs less, and layers that share a mask share the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.attention_calls import (
    attention_arguments,
    change_attention,
)
from gradsplit.compile_core.autograd.captured_graphs.static_tensors import static_tensor
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def put_masks_in_rows(module: GraphModule, keep_random_numbers: bool) -> GraphModule:
    """The captured graph with such copies; ``module`` itself stays as it is.

    Args:
        keep_random_numbers: whether dropout must draw what it draws with the mask as it lies.
    """
    return change_attention(module, lambda node: _changes(node, keep_random_numbers))


def takes_mask(attention: torch.backends.cuda.SDPAParams) -> bool:
    """Whether torch's fused kernel for masks takes these arguments."""
    is_on_gpu = attention.query.device.type == "cuda"
    return is_on_gpu and torch.backends.cuda.can_use_efficient_attention(attention)


def _changes(node: Node, keep_random_numbers: bool) -> dict[str, Any]:
    """The arguments of ``attention_laid_out`` that differ from those of the call; none where it stays."""
    arguments = attention_arguments(node)
    nodes = [*(arguments.get(name) for name in ("query", "key", "value", "attn_mask")), node]
    tensors = [example for each in nodes if (example := static_tensor(each)) is not None]
    dropout_p = arguments.get("dropout_p", 0.0)
    if len(tensors) < len(nodes) or (dropout_p and keep_random_numbers):
        return {}
    *given, mask, result = tensors
    # An expanded last dim masks whole rows, for which kernels differ.
    if mask.dim() < 2 or mask.stride(-1) in (0, 1) or not TensorSpec.of(result).is_dense:
        return {}
    # Autocast has attention compute in the dtype of the result.
    query, key, value = (tensor.to(result.dtype) for tensor in given)
    mask = mask if mask.dtype == torch.bool else mask.to(result.dtype)
    takes, takes_copy = (
        takes_mask(
            torch.backends.cuda.SDPAParams(
                query,
                key,
                value,
                each,
                dropout_p,
                arguments.get("is_causal", False),
                arguments.get("enable_gqa", False),
            )
        )
        for each in (mask, mask.contiguous())
    )
    if takes or not takes_copy:
        return {}
    return {"mask_in_rows": True, "strides": arguments.get("strides", result.stride())}
