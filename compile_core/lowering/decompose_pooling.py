"""Pooling over planes as operators that the lowering knows: see ``ir.max_pooling``.

Limits: windows without dilation and of few places, whose loads a kernel's body writes out; else torch's kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_core.ir import max_pooling

_MOST_PLACES = 25


def max_pool2d(
    self: Tensor,
    kernel_size: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    windows = _windows(self, kernel_size, stride, padding, dilation)
    if windows is None:
        return NotImplemented
    values, places = max_pooling.MAX_POOL(self, *windows, ceil_mode)
    return values, max_pooling.POSITIONS(places, *windows, self.shape[-1])


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
    places = max_pooling.PLACES(indices, *windows, self.shape[-1])
    return max_pooling.GRADIENT(grad_output, places, *windows, self.shape[-2:])


def _windows(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[list[int], list[int], list[int]] | None:
    """Sides, steps and padding of the windows, two numbers each; ``None`` for windows that torch's kernels serve."""
    kernel = _pair(kernel_size)
    is_simple = _pair(dilation) == [1, 1] and kernel[0] * kernel[1] <= _MOST_PLACES
    if not is_simple or not x.dtype.is_floating_point:
        return None
    return kernel, _pair(stride) if stride else kernel, _pair(padding)


def _pair(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[-1]]
