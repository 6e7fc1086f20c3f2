"""The gradient of a convolution's weight, on its way to where a caller wants it: cast and scaled."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = (torch.contiguous_format, torch.channels_last)


def inputs(layout: torch.memory_format) -> tuple[Tensor, Tensor, Tensor]:
    """Images, a weight and what arrives from behind."""
    torch.manual_seed(0)
    shapes = ((2, 6, 7, 7), (4, 6, 3, 3), (2, 4, 7, 7))
    return tuple(torch.randn(shape).bfloat16().to(memory_format=layout) for shape in shapes)  # type: ignore[return-value]


def weight_gradient(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    sides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *sides, [False, True, False])
    return found[1].float() * 0.5
