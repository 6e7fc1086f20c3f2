"""The gradient of max pooling from one byte a window.

Torch's kernel takes the pooled input and the 64-bit positions of the maxima, so both would be kept for the backward. A
maximum's place inside its window fits a byte; the positions, and from them the gradient, follow from it. (TorchInductor
has the same idea as an operator of its own.)

Limits: windows without dilation and of at most 127 places; else torch's kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


def max_pool2d_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Any:
    kernel = _pair(kernel_size)
    steps = _pair(stride) if stride else kernel
    window = kernel[0] * kernel[1]
    if _pair(dilation) != (1, 1) or window > 127 or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    width = self.shape[-1]
    pads = _pair(padding)
    rows = _first_place(grad_output, -2, steps[0], pads[0]).unsqueeze(-1)
    columns = _first_place(grad_output, -1, steps[1], pads[1])
    place = ((indices // width - rows) * kernel[1] + indices % width - columns).to(torch.int8)
    wide = place.to(torch.int64)
    positions = (wide // kernel[1] + rows) * width + wide % kernel[1] + columns
    # Windows overlap, so several gradients meet in one place: narrow floats add up in float32, as in torch's kernel.
    grad = grad_output.float() if grad_output.dtype in _NARROW else grad_output
    return _scatter(grad, positions, self).to(grad_output.dtype)


def _pair(sizes: list[int]) -> tuple[int, int]:
    return (sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _first_place(pooled: Tensor, dim: int, step: int, padding: int) -> Tensor:
    return torch.arange(pooled.shape[dim], device=pooled.device) * step - padding


def _scatter(grad: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Adds up gradients by their position in the plane, in memory laid out as ``like``'s."""
    channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not like.is_contiguous():
        batch, channels, height, width = like.shape
        grad, positions = (x.permute(0, 2, 3, 1).reshape(batch, -1, channels) for x in (grad, positions))
        summed = grad.new_zeros(batch, height * width, channels).scatter_add(1, positions, grad)
        return summed.view(batch, height, width, channels).permute(0, 3, 1, 2)
    grad, positions = grad.flatten(-2), positions.flatten(-2)
    planes = grad.new_zeros(*like.shape[:-2], like.shape[-2] * like.shape[-1])
    return planes.scatter_add(-1, positions, grad).view(like.shape)
