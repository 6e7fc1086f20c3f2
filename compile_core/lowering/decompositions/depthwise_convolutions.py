"""Convolutions of each channel by itself, of which no gradient is asked, as sums over windows.

A library's call of one costs as much as a kernel that computes it with the norm and the activation behind it: there are
few numbers to multiply. Of large images a library's own kernel is faster (MobileNet's of 32 images by a quarter of the
whole), and where gradients are asked the result is saved by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsplit.compile_core.ir import pooling

# Each is a load of a kernel.
_MOST_WEIGHTS = 25
# Of the images. So few take no longer than a launch.
_MOST_ELEMENTS = 1 << 19


def is_depthwise(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether each channel of images ``[N, C, H, W]`` has few weights of its own, and no gradient is asked for."""
    channels, *window = weight.shape[0], *weight.shape[2:]
    known = all(isinstance(size, int) for size in (*input.shape, *weight.shape))
    if not known or input.numel() > _MOST_ELEMENTS:
        return False
    is_alone = weight.shape[1] == 1 and groups == channels == input.shape[1]
    few = is_alone and 1 < window[0] * window[1] <= _MOST_WEIGHTS
    return few and not transposed and {*dilation} == {1} and not torch.is_grad_enabled()


def convolution(input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """``[N, C, H', W']`` for weights ``[C, 1, h, w]``; it lies in memory as the images do."""
    return pooling.WINDOW_SUMS(input, weight.shape[2:], stride, padding, weight.squeeze(1))
