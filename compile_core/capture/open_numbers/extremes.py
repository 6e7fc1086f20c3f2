"""``max`` and ``min`` of an integer and of a tensor that holds one: data decide which of the two the program has."""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.errors import Unsupported

# What every type of floats has exactly.
_GREATEST = 256


class ExtremeValue(Value):
    """The integer or the tensor; ``tensor`` has its number. Both do the same to floats, else the program decides."""

    def __init__(self, tensor: TensorValue) -> None:
        self.tensor = tensor

    def describe(self) -> str:
        return f"the tensor {self.tensor.node.name} or an integer, as data decide"

    def python_type(self) -> type:
        raise Unsupported("data-dependent-branch", f"a use of {self.describe()}")


def extreme(state: CaptureState, function: Any, items: list[Value]) -> Value | None:
    """What ``function``, which is max or min, makes of two such items; None of others."""
    numbers = [item.value for item in items if isinstance(item, ConstantValue) and type(item.value) is int]
    tensors = [item for item in items if isinstance(item, TensorValue) and item.fake.dtype is torch.int64]
    is_pair = len(items) == 2 and numbers and tensors and not tensors[0].fake.dim()
    if not is_pair or abs(numbers[0]) > _GREATEST or not state.keeps_numbers():
        return None
    bound = {"min" if function is max else "max": numbers[0]}
    return ExtremeValue(state.call_torch("clamp", tensors[0], **bound))


def beside(symbol: str, left: Value, right: Value) -> Value:
    """``right`` as an operand of ``left symbol right``."""
    is_float = isinstance(left, TensorValue) and left.fake.dtype.is_floating_point
    return right.tensor if isinstance(right, ExtremeValue) and is_float and symbol in "+-*/" else right
