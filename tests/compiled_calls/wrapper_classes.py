"""Classes of tensors that wrap others, as programs and libraries have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Labelled(Tensor):
    """A tensor with a label, which results take over, and a factor that ``scaled`` multiplies by."""

    value: Tensor
    label: str
    factor: float

    @staticmethod
    def __new__(cls, value: Tensor, label: str, factor: float = 2.0) -> Labelled:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: Tensor, label: str, factor: float = 2.0) -> None:
        self.value, self.label, self.factor = value, label, factor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["value"], (self.label, self.factor)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Labelled:
        return Labelled(inner["value"], *context)

    @property
    def is_named(self) -> bool:
        return bool(self.label)

    def scaled(self) -> Tensor:
        return self * self.factor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, cls)]
        plain_args, plain_kwargs = tree_map_only(cls, lambda each: each.value, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        context = given[0].label, given[0].factor
        out = tree_map_only(Tensor, lambda each: cls(each, *context), found)
        return return_and_correct_aliasing(func, args, kwargs, out)


class Int8Weight(Tensor):
    """A matrix in eight bits with a scale for each row: products with it are those with the rows."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole.shape, dtype=scale.dtype, device=whole.device
        )

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Int8Weight:
        return Int8Weight(inner["whole"], inner["scale"])

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scale = weight.abs().amax(1) / 127
        return cls((weight / scale[:, None]).round().to(torch.int8), scale)

    def dequantised(self) -> Tensor:
        return self.whole.to(self.dtype) * self.scale[:, None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            product = (x @ weight.whole.to(x.dtype).t()) * weight.scale
            return product + bias[0] if bias and bias[0] is not None else product
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            weight = args[0]
            made = cls(func(weight.whole, **kwargs), func(weight.scale, **kwargs))
            return return_and_correct_aliasing(func, args, kwargs, made)
        return func(*tree_map_only(cls, lambda each: each.dequantised(), args), **kwargs)
