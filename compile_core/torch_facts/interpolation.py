"""Linear interpolation where sizes are symbols, with the values of torch's kernels.

Torch's form in Python adds a part of the difference of two elements, which is no number between equal infinities; its
kernels add parts of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.torch_facts.dispatcher import suggest_memory_format

aten = torch.ops.aten


def interpolated(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What takes the place of torch's form of ``aten.upsample_linear1d.vec`` and its like in two and three dims.

    It takes ``[N, C, *sides]``; of integers, which are rounded, it leaves the result to torch's form.
    """

    def run(given: Tensor, output_size: Any, align_corners: bool, scale_factors: Any) -> Tensor:
        if not given.is_floating_point():
            return form(given, output_size, align_corners, scale_factors)
        sizes = given.shape[2:]
        scales: Sequence[Any] = scale_factors or [None] * len(sizes)
        sides = output_size or [_scaled(*each) for each in zip(sizes, scales, strict=True)]
        wide = given.to(torch.promote_types(given.dtype, torch.float32))
        axes: list[tuple[Tensor, Tensor, Tensor]] = []
        for size, side, scale in zip(sizes, sides, scales, strict=True):
            number = torch.arange(side, device=given.device).to(wide.dtype)
            step = interpolation_step(size, side, align_corners, scale)
            place = number * step if align_corners else ((number + 0.5) * step - 0.5).clamp(min=0.0)
            low = place.to(torch.int64)
            axes.append((low, (low + 1).clamp(max=size - 1), (place - low).clamp(0.0, 1.0)))
        result = _along(wide, axes, []).to(given.dtype)
        # CUDA kernels have no other order for few channels.
        is_plain = given.device.type == "cuda" and given.shape[1] < 16
        return result.contiguous(
            memory_format=torch.contiguous_format if is_plain else suggest_memory_format(given)
        )

    return run


def interpolation_step(elements: Any, places: Any, align_corners: bool, scale: float | None) -> Any:
    """How many elements lie between a place and the next."""
    if align_corners:
        return (elements - 1) / (places - 1) if places > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else elements / places


def _scaled(size: Any, factor: float) -> Any:
    return size * int(factor) if int(factor) == factor else torch.sym_int(size * factor)


def _along(given: Tensor, axes: Sequence[tuple[Tensor, Tensor, Tensor]], places: list[Tensor]) -> Tensor:
    """The interpolation along the axes behind those of which the places are known."""
    axis = len(places)
    if axis == len(axes):
        return aten._unsafe_index(given, [None, None, *places])
    low, high, part = (values.reshape(-1, *[1] * (len(axes) - axis - 1)) for values in axes[axis])
    return _along(given, axes, [*places, low]) * (1 - part) + _along(given, axes, [*places, high]) * part
