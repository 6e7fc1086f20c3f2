"""Pooling over planes as operators that the lowering knows; see ``ir.pooling``.

Limits: windows without dilation and of few places, whose loads a kernel's body writes out; means of windows that tile
the plane, and on GPUs of others whose number is not rounded up. Else torch's kernels run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir import pooling
from gradsplit.compile_core.ir.tensor_spec import compute_dtype

_MOST_PLACES = 25
_Windows = tuple[list[int], list[int], list[int]]


def max_pool2d(
    self: Tensor,
    kernel_size: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Decomposition of ``aten.max_pool2d_with_indices`` of ``[*, H, W]`` floats; declines large windows, dilation."""
    windows = _windows(self, kernel_size, stride, padding, dilation)
    if windows is None:
        return NotImplemented
    values, places = pooling.MAX_POOL(self, *windows, ceil_mode)
    return values, pooling.POSITIONS(places, *windows, self.shape[-1])


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
    windows = _windows(self, kernel_size, stride, padding, dilation)
    if windows is None or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    places = pooling.PLACES(indices, *windows, self.shape[-1])
    return pooling.GRADIENT(grad_output, places, *windows, self.shape[-2:])


def avg_pool2d(
    self: Tensor,
    kernel_size: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    tiles_only: bool = True,
) -> Any:
    """Decomposition of ``aten.avg_pool2d`` of ``[*, H, W]`` floats.

    Args:
        tiles_only: windows are declined that do not tile the plane; else those whose number is rounded up.
    """
    kernel = _tile(self, kernel_size, stride, padding)
    if kernel is None:
        windows = None if tiles_only or ceil_mode else _known_windows(self, kernel_size, stride, padding)
        if windows is None:
            return NotImplemented
        sums = pooling.WINDOW_SUMS(self, *windows)
        return (sums / _counts(self, windows, count_include_pad, divisor_override)).to(self.dtype)
    x = self.to(compute_dtype(self.dtype))
    total = None
    for row, column in itertools.product(range(kernel[0]), range(kernel[1])):
        element = x[..., row :: kernel[0], column :: kernel[1]]
        total = element if total is None else total + element
    assert total is not None
    return (total / (divisor_override or kernel[0] * kernel[1])).to(self.dtype)


def avg_pool2d_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    tiles_only: bool = True,
) -> Any:
    """The same of its gradient, without tiles for windows at every place: each element's is a sum over its windows."""
    kernel = _tile(self, kernel_size, stride, padding)
    if kernel is None:
        windows = None if tiles_only or ceil_mode else _known_windows(self, kernel_size, stride, padding)
        if windows is None or windows[1] != [1, 1]:
            return NotImplemented
        share = grad_output.to(compute_dtype(grad_output.dtype))
        share = share / _counts(self, windows, count_include_pad, divisor_override)
        around = [side - 1 - pad for side, pad in zip(windows[0], windows[2], strict=True)]
        return pooling.WINDOW_SUMS(share, windows[0], [1, 1], around).to(grad_output.dtype)
    grad = grad_output.to(compute_dtype(grad_output.dtype))
    share = (grad / (divisor_override or kernel[0] * kernel[1])).to(grad_output.dtype)
    *outer, rows, columns = share.shape
    tiles = share.unsqueeze(-1).unsqueeze(-3).expand(*outer, rows, kernel[0], columns, kernel[1])
    return tiles.reshape(self.shape)


def _known_windows(
    x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> _Windows | None:
    """Any windows of a plane whose sides are known."""
    is_known = all(isinstance(size, int) for size in x.shape[-2:])
    return _windows(x, kernel_size, stride, padding, (1,)) if is_known else None


def _counts(x: Tensor, windows: _Windows, with_padding: bool, divisor: int | None) -> Any:
    """What the sum of each window is divided by: a number, or a matrix of how many places lie in the plane."""
    kernel, steps, padding = windows
    if divisor or with_padding or not any(padding):
        return divisor or kernel[0] * kernel[1]
    places = []
    for size, side, step, pad in zip(x.shape[-2:], kernel, steps, padding, strict=True):
        begin = torch.arange((size + 2 * pad - side) // step + 1, device=x.device) * step - pad
        places.append((begin + side).clamp(max=size) - begin.clamp(min=0))
    return (places[0].unsqueeze(1) * places[1]).to(compute_dtype(x.dtype))


def _tile(
    x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int] | None:
    """The sides of windows that tile the plane without overlap, gaps or padding."""
    windows = _windows(x, kernel_size, stride, padding, (1,))
    if windows is None or windows[0] != windows[1] or any(windows[2]):
        return None
    sides = zip(x.shape[-2:], windows[0], strict=True)
    return windows[0] if all(isinstance(size, int) and size % side == 0 for size, side in sides) else None


def _windows(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> _Windows | None:
    """Sides, steps and padding of the windows, two numbers each; ``None`` for windows that torch's kernels serve."""
    kernel = _pair(kernel_size)
    is_simple = _pair(dilation) == [1, 1] and kernel[0] * kernel[1] <= _MOST_PLACES
    if not is_simple or not x.dtype.is_floating_point:
        return None
    return kernel, _pair(stride) if stride else kernel, _pair(padding)


def _pair(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[-1]]
