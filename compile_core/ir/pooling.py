"""Pooling over planes, as operators of joint graphs whose results generated kernels compute.

A window's sum is in memory before anything is made of it: what reads it more than once, as a normalisation does, would
add up each window as often.

Torch's operator of maxima yields the 64-bit position of each, and its gradient adds up by these positions. A maximum's
place inside its window fits a byte, and which windows a position lies in is known, so that the gradient of an element
can be gathered. (TorchInductor has the same idea as operators of its own.) What is written here, with torch's
operators, is the definition that kernels are tested against, and what runs outside of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir.tensor_spec import compute_dtype

aten = torch.ops.aten


def _pool(x: Tensor, *windows: Any) -> tuple[Tensor, Tensor]:
    kernel, stride, padding, ceil_mode = windows
    values, positions = aten.max_pool2d_with_indices.default(x, kernel, stride, padding, 1, ceil_mode)
    return values, _places(positions, kernel, stride, padding, x.shape[-1])


def _pool_shapes(x: Tensor, *windows: Any) -> tuple[Tensor, Tensor]:
    kernel, stride, padding, ceil_mode = windows
    values, positions = aten.max_pool2d_with_indices.default(x, kernel, stride, padding, 1, ceil_mode)
    return values, _bytes_like(positions)


def _places(
    positions: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], width: int
) -> Tensor:
    rows, columns = _window_starts(positions, stride, padding)
    return ((positions // width - rows) * kernel[1] + positions % width - columns).to(torch.int8)


def _positions(
    places: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], width: int
) -> Tensor:
    rows, columns = _window_starts(places, stride, padding)
    wide = places.to(torch.int64)
    return (wide // kernel[1] + rows) * width + wide % kernel[1] + columns


def _window_starts(pooled: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows, columns = (
        torch.arange(pooled.shape[dim], device=pooled.device) * stride[dim] - padding[dim] for dim in (-2, -1)
    )
    return rows.unsqueeze(-1), columns


def _gradient(grad: Tensor, places: Tensor, *windows: Any) -> Tensor:
    kernel, stride, padding, size = windows
    positions = _positions(places, kernel, stride, padding, size[1]).flatten(-2)
    # Windows overlap, so several gradients meet in one place: 16-bit floats add up in float32, as in torch's kernel.
    wide = grad.to(compute_dtype(grad.dtype)).flatten(-2)
    planes = wide.new_zeros(*wide.shape[:-1], size[0] * size[1]).scatter_add(-1, positions, wide)
    result = _gradient_shape(grad, places, *windows)
    return result.copy_(planes.view(result.shape))


def _gradient_shape(grad: Tensor, places: Tensor, *windows: Any) -> Tensor:
    *_, size = windows
    result = grad.new_empty(*places.shape[:-2], *size)
    is_last = places.dim() == 4 and places.is_contiguous(memory_format=torch.channels_last)
    if is_last and not places.is_contiguous():
        return result.to(memory_format=torch.channels_last)
    return result


def _window_sums(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], weights: Tensor | None = None
) -> Tensor:
    wide = x.to(compute_dtype(x.dtype))
    if weights is not None:
        each = weights.to(wide.dtype).unsqueeze(1)
        sums = aten.conv2d.default(wide, each, None, stride, padding, [1, 1], len(weights))
        return _window_sum_shapes(x, kernel, stride, padding, weights).copy_(sums)
    padded = aten.constant_pad_nd.default(wide, [padding[1], padding[1], padding[0], padding[0]])
    return aten.avg_pool2d.default(padded, kernel, stride, 0, False, True, 1)


def _window_sum_shapes(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], weights: Tensor | None = None
) -> Tensor:
    sums = _window_sums(x, kernel, stride, padding)
    return sums if weights is None else torch.empty_like(sums, dtype=x.dtype)


_library = torch.library.Library("gradsplit", "FRAGMENT")


def _define(
    name: str, signature: str, function: Callable[..., Any], shapes: Callable[..., Any]
) -> torch._ops.OpOverload:
    _library.define(f"{name}{signature}")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradsplit::{name}", shapes, lib=_library)
    return getattr(torch.ops.gradsplit, name).default


def _bytes_like(positions: Tensor, *_: object) -> Tensor:
    return torch.empty_like(positions, dtype=torch.int8)


def _positions_like(places: Tensor, *_: object) -> Tensor:
    return torch.empty_like(places, dtype=torch.int64)


_WINDOWS = "int[] kernel, int[] stride, int[] padding"

# The maximum of each window and its place there, counted by rows: of equals the first, of NaNs the last.
MAX_POOL = _define(
    "max_pool", f"(Tensor x, {_WINDOWS}, bool ceil_mode) -> (Tensor, Tensor)", _pool, _pool_shapes
)
# Places as torch's positions in planes of a width, and back.
POSITIONS = _define(
    "max_pool_positions", f"(Tensor places, {_WINDOWS}, SymInt width) -> Tensor", _positions, _positions_like
)
PLACES = _define(
    "max_pool_places", f"(Tensor positions, {_WINDOWS}, SymInt width) -> Tensor", _places, _bytes_like
)
# What lies in the padding counts as 0. Sums are in the dtype that is computed in. With weights, one for each place in
# the windows of each channel (``[C, h, w]``, of images ``[N, C, H, W]``), they are rounded to that of the images.
WINDOW_SUMS = _define(
    "window_sums",
    f"(Tensor x, {_WINDOWS}, Tensor? weights=None) -> Tensor",
    _window_sums,
    _window_sum_shapes,
)
# The gradient with respect to planes of a size.
GRADIENT = _define(
    "max_pool_gradient",
    f"(Tensor grad, Tensor places, {_WINDOWS}, SymInt[] size) -> Tensor",
    _gradient,
    _gradient_shape,
)
