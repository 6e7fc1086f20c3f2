"""What the compiler knows of a tensor without its data.

Sizes and strides of fake tensors may be SymInts. A question about such a spec is answered for the sizes of the call
that is compiled for, at the price of a condition in their ShapeEnv where it could be answered otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.symbolic_numbers import (
    maybe,
    memory_order,
    surely,
    value_at_compilation,
)

HALF_FLOATS = frozenset({torch.float16, torch.bfloat16})


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute, ours and eager's: float32 for 16-bit floats, else the dtype itself."""
    return torch.float32 if dtype in HALF_FLOATS else dtype


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (elements), dtype and device of a strided tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake tensor of the strided layout."""
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
        """The spec of a row-major tensor of this shape."""
        return TensorSpec(tuple(shape), contiguous_strides(shape), dtype, device)

    @property
    def is_open(self) -> bool:
        """Whether a size or stride is a SymInt."""
        return any(isinstance(number, torch.SymInt) for number in (*self.shape, *self.stride))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements (not of the storage that strides may span)."""
        return self.numel * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory, those between them that are none of the tensor's included."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie row-major without gaps; strides of size-1 dims do not count."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if maybe(size != 1) and maybe(stride != expected):
                return surely(self.numel == 0)
            expected *= size
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one gapless range of memory, in whatever order of dims."""
        expected = 1
        sizes = [(t, n) for n, t in zip(self.shape, self.stride, strict=True) if maybe(n != 1)]
        for stride, size in sorted(sizes, key=lambda pair: tuple(map(value_at_compilation, pair))):
            if maybe(stride != expected):
                return surely(self.numel == 0)
            expected *= size
        return True

    @property
    def may_overlap(self) -> bool:
        """Whether two elements may lie in one place, as those of an expanded tensor do."""
        sizes = [tuple(map(value_at_compilation, pair)) for pair in zip(self.stride, self.shape, strict=True)]
        reach = 0
        for stride, size in sorted(pair for pair in sizes if pair[1] != 1):
            if stride <= reach:
                return all(size != 0 for _, size in sizes)
            reach += stride * (size - 1)
        return False

    @property
    def layout(self) -> list[int]:
        """Strides that say something: not those of dims of one element, and none of an empty tensor."""
        if surely(self.numel == 0):
            return []
        return [stride for size, stride in zip(self.shape, self.stride, strict=True) if maybe(size != 1)]

    def is_laid_out_as(self, other: TensorSpec) -> bool:
        """Whether the layouts of two specs of one shape are the same, as far as that is known of sizes of data."""
        one, two = self.layout, other.layout
        return len(one) == len(two) and not any(maybe(a != b) for a, b in zip(one, two, strict=True))

    @property
    def memory_order(self) -> tuple[list[int], list[int]]:
        """The dims as they lie in memory, outermost first, and the permutation back from that order."""
        return memory_order(self.stride)

    def empty(self) -> torch.Tensor:
        """A tensor of this spec with whatever its memory holds."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        # A look at open strides would make conditions on the sizes.
        layout = "" if self.is_open or self.is_contiguous else f" strides {list(self.stride)}"
        return f"{dtype}{list(self.shape)}{layout} {self.device}"


def in_memory_order(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The values in a dense tensor whose dims lie in memory in the order of ``spec``; the tensor itself if it does."""
    order, back = spec.memory_order
    return value.permute(order).contiguous().permute(back)


def device_type_of(examples: Sequence[Any]) -> str:
    """The type of device that a graph of these inputs computes on: an accelerator where any lies on one."""
    types = [example.device.type for example in examples if isinstance(example, torch.Tensor)]
    return next((kind for kind in types if kind != "cpu"), "cpu")


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether elements lie equally far apart; strides of size-1 dims do not count."""
    return all(n == 1 or a == b for n, a, b in zip(shape, one, other, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
