"""The inputs of a written program: drawn from a seed, or read from the file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from gradsplit.compile_core.torch_facts.symbolic_numbers import repeated_dims

TENSORS = "repro.safetensors"


def draw(
    seed: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of this shape with these strides: of normal numbers, and of zeros and ones for other dtypes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    else:
        values = torch.randint(0, 2, tuple(shape), generator=generator)
    return _laid_out(values, stride, dtype, device, requires_grad)


def stored(
    folder: Path,
    name: str,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of those in ``repro.safetensors``, with this shape and these strides."""
    values = load_file(folder / TENSORS)[name]
    return _laid_out(values.reshape(tuple(shape)), stride, dtype, device, requires_grad)


def _laid_out(
    values: Tensor, stride: Sequence[int], dtype: torch.dtype, device: str, requires_grad: bool
) -> Tensor:
    repeated = repeated_dims(values.shape, stride)
    if repeated:
        base = values.to(device, dtype)
        for dim in repeated:
            base = base.narrow(dim, 0, 1)
        result = base.expand(values.shape)
    else:
        result = torch.empty_strided(tuple(values.shape), tuple(stride), dtype=dtype, device=device)
        result.copy_(values)
    return result.requires_grad_(requires_grad)
