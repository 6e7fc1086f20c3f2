"""Gradients of linear interpolation on GPUs: each element is a sum over the places that it contributed to.

Torch's kernels add each place's gradient to the elements around it by atomic operations, which meet where a plane is
made larger: 1.7 of the 8.4 ms of DeepLab's step. What an axis was interpolated from is independent of the other axes,
so a sum for each axis, one after the other, takes a window of places of one axis alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir.tensor_spec import compute_dtype
from gradsplit.compile_core.torch_facts.interpolation import interpolation_step

aten = torch.ops.aten


def _backward(
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Any:
    """Decomposition for an input of ``input_size``, ``[N, C, *sides]``, by scales if any; declines open sizes."""
    sides = list(zip_longest(input_size[2:], output_size, scales))
    if not grad_output.dtype.is_floating_point or not all(
        isinstance(size, int) and size > 0 for side in sides for size in side[:2]
    ):
        return NotImplemented
    total = grad_output.to(compute_dtype(grad_output.dtype))
    if all(elements == places for elements, places, _ in sides):
        return total.to(grad_output.dtype, copy=True)  # whatever the scales are
    # The axis whose places are neighbours in memory comes first: it leaves the least to be read by the others.
    for axis, (elements, places, scale) in reversed(list(enumerate(sides, 2))):
        total = _along(
            total, axis, elements, interpolation_step(elements, places, align_corners, scale), align_corners
        )
    return total.to(grad_output.dtype)


def _along(grad: Tensor, axis: int, elements: int, step: float, align_corners: bool) -> Tensor:
    """The gradient of the ``elements`` that ``axis`` was interpolated from."""
    places = grad.shape[axis]
    if step == 1 and elements == places:
        return grad
    shift = 0.0 if align_corners else 0.5
    element = torch.arange(elements, dtype=grad.dtype, device=grad.device).unsqueeze(1)
    count = places if step == 0 else min(places, math.floor(2 / step) + 3)
    place = torch.arange(count, dtype=grad.dtype, device=grad.device)
    if count < places:
        place = ((element - 1 + shift) / step - shift).floor().clamp(min=0) + place
        index = place.clamp(max=places - 1).to(torch.int64)
        seen = aten.index.Tensor(grad, [None] * axis + [index])
    else:
        seen = grad.unsqueeze(axis)
    distance = (((place + shift) * step - shift).clamp(min=0, max=elements - 1) - element).abs()
    shape = [elements, count] + [1] * (grad.dim() - 1 - axis)
    contributes = ((distance < 1) & (place < places)).reshape(shape)
    # Chosen, as a share of 0 would make NaN of what is infinite.
    return torch.where(contributes, seen * (1 - distance).reshape(shape), 0.0).sum(axis + 1)


INTERPOLATION_GRADIENTS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.upsample_linear1d_backward.default: _backward,
    aten.upsample_bilinear2d_backward.default: _backward,
    aten.upsample_trilinear3d_backward.default: _backward,
}
