"""Convolutions whose windows lie side by side, as where an image is cut into patches, as products.

A library's kernels want the weights channels-last, to which they would be transposed in each call, and channels in
eights, which images do not have. Of patches that lie one after the other, which what computes the image can write, the
convolution is a product with the weights as they are; so are both gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def is_of_patches(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether a convolution of images ``[N, C, H, W]`` computes with each pixel once, and has them in rows of pixels or
    channels-last."""
    window = weight.shape[2:]
    if transposed or groups != 1 or any(padding) or [*stride] != [*window] or {*dilation} != {1}:
        return False
    is_whole = all(
        isinstance(side, int) and side % length == 0
        for side, length in zip(input.shape[2:], window, strict=True)
    )
    return is_whole and max(window) > 1 and weight.is_contiguous() and _lies_in_order(input)


def convolution(input: Tensor, weight: Tensor) -> Tensor:
    """``[N, O, H / h, W / w]``, channels-last, for weights ``[O, C, h, w]``."""
    sides = [side // length for side, length in zip(input.shape[2:], weight.shape[2:], strict=True)]
    rows = aten.mm.default(_patches(input, weight), _matrix(weight).t())
    return rows.view(input.shape[0], *sides, weight.shape[0]).permute(0, 3, 1, 2)


def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, for_input: bool, for_weight: bool
) -> tuple[Tensor | None, Tensor | None, None]:
    """The gradients of the input, channels-last, and of the weights."""
    arriving = grad_output.permute(0, 2, 3, 1)
    rows = aten.clone.default(arriving, memory_format=torch.contiguous_format).view(-1, weight.shape[0])
    grad_input = grad_weight = None
    if for_input:
        count, channels, *sides = input.shape
        high, wide = weight.shape[2:]
        patches = aten.mm.default(rows, _matrix(weight))
        split = patches.view(count, sides[0] // high, sides[1] // wide, channels, high, wide)
        pixels = aten.clone.default(split.permute(0, 1, 4, 2, 5, 3), memory_format=torch.contiguous_format)
        grad_input = pixels.view(count, *sides, channels).permute(0, 3, 1, 2)
    if for_weight:
        grad_weight = aten.mm.default(rows.t(), _patches(input, weight)).view(weight.shape)
    return grad_input, grad_weight, None


def _patches(input: Tensor, weight: Tensor) -> Tensor:
    """``[N H / h W / w, C h w]``: each in the order of a filter's weights."""
    count, channels, *sides = input.shape
    high, wide = weight.shape[2:]
    rows, columns = sides[0] // high, sides[1] // wide
    if input.is_contiguous():
        split = input.view(count, channels, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
    else:
        pixels = input.permute(0, 2, 3, 1)
        split = pixels.view(count, rows, high, columns, wide, channels).permute(0, 1, 3, 5, 2, 4)
    copied = aten.clone.default(split, memory_format=torch.contiguous_format)
    return copied.view(count * rows * columns, channels * high * wide)


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(1)


def _lies_in_order(image: Tensor) -> bool:
    return image.is_contiguous() or image.is_contiguous(memory_format=torch.channels_last)
