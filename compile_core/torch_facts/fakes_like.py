"""Fake tensors made after other tensors, for a trace or in the place of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fakes_like(examples: Sequence[Any], number: Callable[[Any], Any] = lambda number: number) -> list[Any]:
    """Fake tensors of one mode: of that of the symbolic ones, or a new one, whatever mode the examples belong to.

    Args:
        examples: tensors and numbers.
        number: what to make of a size, stride or number.
    """
    symbolic = [example for example in examples if getattr(example, "_has_symbolic_sizes_strides", False)]
    with symbolic[0].fake_mode if symbolic else FakeTensorMode():
        return [
            torch.empty_strided(
                tuple(map(number, example.shape)),
                tuple(map(number, example.stride())),
                dtype=example.dtype,
                device=example.device,
            ).requires_grad_(example.requires_grad)
            if isinstance(example, torch.Tensor)
            else number(example)
            for example in examples
        ]
