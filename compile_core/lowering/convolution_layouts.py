"""Convolutions of 16-bit images on a GPU in the channels-last layout, which is the tensor cores' own.

Given rows of pixels, cuDNN transposes every input and every result of every convolution. Traced with channels-last
operands instead, a convolution's result is channels-last, and so is what follows from it element by element: of a whole
network, only the first input and the weights are transposed, and a weight's gradient back.
(TorchInductor's layout optimisation has the same aim, over finished graphs.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


def convolution(input: Tensor, weight: Tensor, *settings: Any) -> Any:
    """Decomposition of ``aten.convolution``; declines where the operands are as they should be."""
    if not _is_transposed_by_cudnn(input, weight):
        return NotImplemented
    return aten.convolution.default(_channels_last(input), _channels_last(weight), *settings)


def convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> Any:
    """Decomposition of ``aten.convolution_backward``; the weight's gradient gets the weight's layout."""
    if not _is_transposed_by_cudnn(grad_output, input, weight):
        return NotImplemented
    operands = (_channels_last(grad_output), _channels_last(input), _channels_last(weight))
    grad_input, grad_weight, grad_bias = aten.convolution_backward.default(*operands, *settings)
    if grad_weight is not None and weight.is_contiguous():
        grad_weight = aten.clone.default(grad_weight, memory_format=torch.contiguous_format)
    return grad_input, grad_weight, grad_bias


def _is_transposed_by_cudnn(*operands: Tensor) -> bool:
    first = operands[0]
    return (
        first.device.type == "cuda"
        and first.dtype in _NARROW
        and first.dim() == 4
        and not all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands)
    )


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return aten.clone.default(tensor, memory_format=torch.channels_last)
