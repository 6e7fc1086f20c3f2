"""The gradient of an embedding's table on a GPU: rows of gradients are added where their indices say.

Torch's kernels sort the indices, a dozen launches to add a few thousand rows in a fixed order. Here each row is added
by atomic operations, in whatever order they come; ``torch.use_deterministic_algorithms`` has torch sort again. A table
of few rows, as of the types of tokens, or of few numbers, as the biases of distances between tokens, would have all
additions meet at the same addresses: it is a sum over all indices, once for each of its rows. Tables of 16-bit floats
stay with torch, whose sums are of float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_DEVICE_TYPE = "cuda"
_FEW_ROWS = 4
_FEW_NUMBERS = 512
_MANY_A_ROW = 256


def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Decomposition of ``aten.embedding_dense_backward`` for float32 and float64 on GPUs; declines what torch does as
    well or better.

    ``grad_output`` is ``[*indices.shape, D]``, the result ``[num_weights, D]``.
    """
    wide = grad_output.dtype in (torch.float32, torch.float64)
    if grad_output.device.type != _DEVICE_TYPE or not wide or scale_grad_by_freq:
        return NotImplemented
    places = aten.reshape.default(indices, [-1])
    rows = aten.reshape.default(grad_output, [-1, grad_output.shape[-1]])
    if padding_idx >= 0:
        rows = torch.where((places == padding_idx).unsqueeze(1), 0.0, rows)
    if num_weights <= _FEW_ROWS or _meet(rows, num_weights):
        numbers = torch.arange(num_weights, dtype=places.dtype, device=places.device)
        chosen = places.unsqueeze(1) == numbers
        return torch.where(chosen.unsqueeze(2), rows.unsqueeze(1), 0.0).sum(0)
    return aten.index_add.default(rows.new_zeros(num_weights, rows.shape[1]), 0, places, rows)


def _meet(rows: Tensor, num_weights: int) -> bool:
    """Whether most additions wait for others to the same addresses: the 262,144 distances of T5's 512 tokens, in 32
    rows of 8 heads, took 2 ms."""
    count, width = rows.shape
    is_static = isinstance(count, int) and isinstance(width, int)
    return is_static and num_weights * width <= _FEW_NUMBERS and count >= _MANY_A_ROW * num_weights
