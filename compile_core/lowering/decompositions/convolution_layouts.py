"""Convolutions on a GPU: 16-bit images in the channels-last layout, which is the tensor cores' own.

Given rows of pixels, cuDNN transposes every input and every result of every convolution. Traced with channels-last
operands instead, a convolution's result is channels-last, and so is what follows from it element by element: of a whole
network, only the first input and the weights are transposed, and a weight's gradient back.
(TorchInductor's layout optimisation has the same aim, over finished graphs.)

What the program views as if rows of pixels lay in memory is laid out so first.

Where a traced graph turns out to read elements in the order of memory, it is traced again in eager's layouts; see
``reads_memory_order``.

A bias is added after the convolution and its gradient is a sum of its own, as in torch's kernels for GPUs, so that both
fuse with what is beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.numbers import is_sized_by_data
from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS
from gradsplit.compile_core.lowering.decompositions import depthwise_convolutions, patch_convolutions
from gradsplit.compile_core.torch_facts.dispatcher import draws_in_memory_order

aten = torch.ops.aten

# Of operators that read elements by strides.
_KNOWN_NAMESPACES = ("aten", "prims", "gradsplit", "torchvision")
_READERS_OF_MEMORY = {aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter, aten.resize}
_keeps_eagers = ContextVar("_keeps_eagers", default=False)


@contextmanager
def eagers_layouts() -> Iterator[None]:
    """What is traced meanwhile lies in memory as in eager."""
    token = _keeps_eagers.set(True)
    try:
        yield
    finally:
        _keeps_eagers.reset(token)


def reads_memory_order(graph: torch.fx.Graph, draws_own_numbers: bool) -> bool:
    """Whether channels-last convolutions of a graph give elements to something by the order of memory.

    Torch's random numbers go to elements in that order, as a mask of dropout under ``fallback_random``; a program may
    say where in memory it reads; and an operator of the user's may take its arguments for rows of pixels.

    Args:
        draws_own_numbers: those that need not be torch's are functions of an element's index.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    # A permutation gives the images of convolutions that are products.
    makers = (aten.convolution.default, aten.permute.default)
    images = [node.meta["val"] for node in nodes if node.target in makers]
    if not any(image.dim() == 4 and not is_sized_by_data(image) and _turns(image) for image in images):
        return False
    return any(_reads_memory_order(node, draws_own_numbers) for node in nodes)


def _reads_memory_order(node: torch.fx.Node, draws_own_numbers: bool) -> bool:
    target = node.target
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    if not any(sum(_may_be_more(size) for size in tensor.shape) > 1 for tensor in tensors):
        return False
    if isinstance(target, KeptCall):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in _KNOWN_NAMESPACES or target.overloadpacket in _READERS_OF_MEMORY:
        return True
    return draws_in_memory_order(node) and (not draws_own_numbers or node.kwargs.get("generator") is not None)


def _may_be_more(size: int | torch.SymInt) -> bool:
    """Whether a dim may have several elements, without a condition on a size that is open."""
    return not isinstance(size, int) or size != 1


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    """Decomposition of ``aten.convolution``: without its bias, and for images ``[N, C, H, W]`` of 16-bit floats with
    operands in the channels-last layout; declines where neither changes anything."""
    if bias is not None:
        result = aten.convolution.default(input, weight, None, *settings)
        return result + bias.reshape(-1, *[1] * (result.dim() - 2))
    if not _is_image(input):
        return NotImplemented
    if not _keeps_eagers.get() and patch_convolutions.is_of_patches(input, weight, *settings):
        return patch_convolutions.convolution(input, weight)
    if not _keeps_eagers.get() and depthwise_convolutions.is_depthwise(input, weight, *settings):
        return depthwise_convolutions.convolution(_channels_last(input), weight, *settings[:2])
    return frozen_convolution(input, weight, bias, *settings)


def frozen_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    """The same on a CPU, for floats of any size: weights that stay as they are are transposed once."""
    if input.dim() != 4 or _keeps_eagers.get() or _are_channels_last(input, weight):
        return NotImplemented
    return aten.convolution.default(_channels_last(input), _channels_last(weight), bias, *settings)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    *settings: Any,
) -> Any:
    """Decomposition of ``aten.convolution_backward``; the weight's gradient gets the weight's layout."""
    *geometry, (for_input, for_weight, for_bias) = settings
    if for_bias:
        grad_bias = torch.sum(grad_output, [dim for dim in range(grad_output.dim()) if dim != 1])
        if not for_input and not for_weight:
            return None, None, grad_bias
        operands, mask = (grad_output, input, weight), [for_input, for_weight, False]
        grad_input, grad_weight, _ = aten.convolution_backward.default(*operands, None, *geometry, mask)
        return grad_input, grad_weight, grad_bias
    if not _is_image(grad_output) or _keeps_eagers.get():
        return NotImplemented
    if patch_convolutions.is_of_patches(input, weight, *geometry):
        return patch_convolutions.convolution_backward(grad_output, input, weight, for_input, for_weight)
    if _are_channels_last(grad_output, input, weight):
        return NotImplemented
    operands = (_channels_last(grad_output), _channels_last(input), _channels_last(weight))
    grad_input, grad_weight, _ = aten.convolution_backward.default(*operands, bias_sizes, *settings)
    if grad_weight is not None and weight.is_contiguous():
        grad_weight = aten.clone.default(grad_weight, memory_format=torch.contiguous_format)
    return grad_input, grad_weight, None


def view(tensor: Tensor, size: Sequence[int]) -> Any:
    """Decomposition of ``aten.view``, which the program could make of eager's layout; declines where there is one."""
    if tensor.dim() != 4 or tensor.is_contiguous() or not _are_channels_last(tensor):
        return NotImplemented
    count, channels, *_ = tensor.shape
    known = prod(length for length in size if length != -1)
    sizes = [tensor.numel() // known if length == -1 else length for length in size]
    # Its memory is images, then pixels, then channels: only the two sides of pixels are one.
    beginnings = list(accumulate(sizes, mul, initial=1))
    if count in beginnings and count * channels in beginnings:
        return NotImplemented
    return aten.view.default(aten.clone.default(tensor, memory_format=torch.contiguous_format), sizes)


def _is_image(tensor: Tensor) -> bool:
    return tensor.dtype in HALF_FLOATS and tensor.dim() == 4


def _are_channels_last(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)


def _turns(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and _are_channels_last(tensor)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return aten.clone.default(tensor, memory_format=torch.channels_last)
