"""Experts whose products are an operator of the program's own, with a backward that looks at where groups end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def product_of_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times a matrix of its own."""
    result, begin = rows.new_zeros(rows.shape[0], weights.shape[2]), 0
    for k, end in enumerate(ends.tolist()):
        result[begin:end] = rows[begin:end] @ weights[k]
        begin = end
    return result


def fake_product_of_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


grouped_product = torch.library.custom_op(
    "gradsplit_tests::grouped_product", product_of_groups, mutates_args=()
)
grouped_product.register_fake(fake_product_of_groups)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.ends = inputs[2]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights = ctx.saved_tensors
    of_rows, of_weights, begin = torch.zeros_like(rows), torch.zeros_like(weights), 0
    for k, end in enumerate(ctx.ends.tolist()):
        if begin == end:
            continue
        torch.mm(gradient[begin:end], weights[k].T, out=of_rows[begin:end])
        torch.mm(rows[begin:end].T, gradient[begin:end], out=of_weights[k])
        begin = end
    return of_rows, of_weights, None


grouped_product.register_autograd(_gradients, setup_context=_save)


class Experts(nn.Module):
    """Layers of three experts each; the last rows of the input may belong to none."""

    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, width, width)) for _ in range(layers))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        for norm, weights in zip(self.norms, self.weights, strict=True):
            hidden = nn.functional.dropout(norm(x), 0.25, self.training)
            x = x + nn.functional.gelu(grouped_product(hidden, weights, ends))
        return x
