"""Operators over lists of tensors, which optimizers are written in, as one operator for each tensor.

That is what torch's own kernels do on the CPU; the loops are joined again by ``fuse`` and ``batch_nests``. Torch's
quicker kernels on the GPU compute the same, elsewhere rounded by at most as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip

# Operator over lists -> the operator for one tensor, which takes an element of each list, and the rest as it is.
_BINARY: Mapping[str, tuple[str, ...]] = {
    "add": ("List", "Scalar", "ScalarList", "Tensor"),
    "sub": ("List", "Scalar", "ScalarList"),
    "mul": ("List", "Scalar", "ScalarList", "Tensor"),
    "div": ("List", "Scalar", "ScalarList", "Tensor"),
    "clamp_min": ("List", "Scalar", "ScalarList"),
    "clamp_max": ("List", "Scalar", "ScalarList"),
    "maximum": ("List",),
    "minimum": ("List",),
    "pow": ("List", "Scalar", "ScalarList", "ScalarAndTensor"),
    "lerp": ("List", "Scalar", "ScalarList"),
}


def _with_value(operator: Any, self: Tensor, first: Tensor, second: Tensor, value: Any = 1) -> Tensor:
    return operator(self, first, second, value=value)


def _norm(self: Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(self, ord, dtype=dtype)


def _for_each(one: Callable[..., Tensor], *arguments: Any, **keywords: Any) -> list[Tensor]:
    count = next(len(argument) for argument in arguments if isinstance(argument, (list, tuple)))
    return [
        one(
            *(argument[k] if isinstance(argument, (list, tuple)) else argument for argument in arguments),
            **keywords,
        )
        for k in range(count)
    ]


def _operators() -> Iterator[tuple[str, str, Callable[..., Tensor]]]:
    for name in _UNARY:
        yield name, "default", getattr(aten, name)
    for name, overloads in _BINARY.items():
        for overload in overloads:
            yield name, overload, getattr(aten, name)
    for overload in ("Scalar", "ScalarList"):
        yield "maximum", overload, aten.clamp_min
        yield "minimum", overload, aten.clamp_max
        for name in ("addcmul", "addcdiv"):
            yield name, overload, functools.partial(_with_value, getattr(aten, name))
    yield "zero", "default", aten.zeros_like
    yield "copy", "default", aten.copy
    yield "norm", "Scalar", _norm


def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """A decomposition for each operator over lists that this torch has."""
    table: dict[Any, Callable[..., Any]] = {}
    for name, overload, one in _operators():
        packet = getattr(aten, f"_foreach_{name}", None)
        if packet is not None and overload in packet.overloads():
            table[getattr(packet, overload)] = functools.partial(_for_each, one)
    return table
