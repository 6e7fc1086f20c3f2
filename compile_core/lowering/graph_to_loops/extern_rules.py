"""Calls of torch's own kernels: which are meant to stay, and how results are directed into existing
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.row_chunks import ADD_PRODUCT, ADD_PRODUCT_

aten = torch.ops.aten

# Matrix products write into memory that the program owns, so that buffers are reused instead of allocated
# each time.
OUT_VARIANTS: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}

# Operators that change a copy of their first argument, which a kernel that computes that argument may have made.
IN_PLACE_VARIANTS: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = {
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    ADD_PRODUCT: ADD_PRODUCT_,
}

# Operators that read rows of their arguments in aligned pieces: torch has left gaps between the rows of masks for them.
READ_ALIGNED_ROWS = frozenset(
    {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._efficient_attention_forward.default,
        aten._efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)

# Operators that run as torch's kernels by choice; any other extern call is a fallback.
_KEPT_WHOLE = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "_linear_pointwise", "_convolution_pointwise", "convolution",
        "convolution_backward", "cudnn_convolution", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward", "_flash_attention_forward",
        "_flash_attention_backward", "_efficient_attention_forward", "_efficient_attention_backward",
        "_cudnn_attention_forward", "_cudnn_attention_backward", "embedding_dense_backward",
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "sort", "topk", "index_put_", "index_add_",
        "scatter_add_", "scatter", "native_dropout", "bernoulli", "rand", "randn", "rand_like", "randn_like", "randint",
        "randperm", "uniform", "normal", "empty", "empty_like", "empty_strided", "new_empty", "copy_", "kept_call",
        "after", "wide_product", "add_product_", "lstm_layer", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
        "cudnn_layer", "cudnn_layer_backward",
    }
)  # fmt: skip


def fallback_calls(program: LoopProgram) -> tuple[ExternCall, ...]:
    """The extern calls that exist only because the lowering has no rule for their operator."""
    return tuple(
        step
        for step in program.steps
        if isinstance(step, ExternCall) and step.target._schema.name.split("::")[1] not in _KEPT_WHOLE
    )


def out_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that writes the single result of ``target`` into its keyword ``out``, if there is one."""
    if target in OUT_VARIANTS:
        return OUT_VARIANTS[target]
    if len(target._schema.returns) != 1:
        return None
    packet = target.overloadpacket
    name = "out" if target._overloadname == "default" else f"{target._overloadname}_out"
    if name not in packet.overloads():
        return None
    candidate = getattr(packet, name)
    wanted = [argument.name for argument in target._schema.arguments]
    offered = [argument.name for argument in candidate._schema.arguments if argument.name != "out"]
    takes_out = any(argument.name == "out" for argument in candidate._schema.arguments)
    return candidate if takes_out and offered == wanted else None


def scalar_factor(node: torch.fx.Node) -> tuple[torch.fx.Node, float] | None:
    """``(product, factor)`` where the node is a number times (or a division by a number of) a matrix product.

    Such a factor becomes the ``alpha`` of the product and costs nothing; the gradients of data parallel
    training are all divided by the number of processes.
    """
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return None
    product, factor = node.args
    if isinstance(factor, torch.fx.Node):
        if node.target is not aten.mul.Tensor:
            return None
        product, factor = factor, product
    if (
        not isinstance(factor, (int, float))
        or isinstance(factor, bool)
        or not isinstance(product, torch.fx.Node)
    ):
        return None
    if factor != 0 and node.target in (aten.div.Tensor, aten.div.Scalar):
        factor = 1.0 / factor
    if factor == 0 or not math.isfinite(factor):
        return None  # libraries compute nothing of a product times 0, nor of one of no terms
    if not product.meta["val"].dtype.is_floating_point or node.meta["val"].dtype != product.meta["val"].dtype:
        return None
    return product, float(factor)
