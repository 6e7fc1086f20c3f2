"""Python numbers that are known only when the graph runs: read out of a tensor, and what is computed from them.

Such a number is a node of the graph as tensors are, and every Python operation on it is a node too, so the graph
computes with the same double precision, in the same order, as the program. What decides about control flow or
about shapes cannot be such a number.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicNumber, compare_numbers
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue

# No power, difference or quotient that programs form of it is zero.
_EXAMPLE = 0.375


class ScalarValue(Value):
    """A number in the graph. ``example`` has its type; its value is made up."""

    def __init__(self, node: fx.Node, example: float | int) -> None:
        self.node = node
        self.example = example

    def python_type(self) -> type:
        return type(self.example)

    def describe(self) -> str:
        return f"the number {self.node.name}, which depends on data"

    def truth(self, state: CaptureState) -> bool:
        raise state.unsupported(
            "data-dependent-branch", f"the truth value of {self.describe()}", "keep the value in a tensor"
        )

    def graph_argument(self, state: CaptureState) -> Any:
        return self.node


def read_scalar(state: CaptureState, tensor: TensorValue) -> ScalarValue:
    """``tensor.item()`` as a node."""
    dtype = tensor.fake.dtype
    if tensor.fake.numel() != 1 or dtype.is_complex or dtype is torch.bool:
        raise state.unsupported("data-dependent-value", f"item() of {tensor.describe()}")
    example = _EXAMPLE if dtype.is_floating_point else 3
    return ScalarValue(state.add_scalar_node("call_method", "item", (tensor.node,), example), example)


_OPERATIONS = frozenset(
    [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, float]
)


def compute_scalar(state: CaptureState, function: Any, operands: list[Value]) -> Value | None:
    """A Python operation with such a number among its operands as a node; None where there is none."""
    if not any(isinstance(operand, ScalarValue) for operand in operands):
        return None
    known = all(
        isinstance(operand, ScalarValue)
        or _stays_open(state, function, operand)
        or type(getattr(operand, "value", None)) in (int, float)
        for operand in operands
    )
    if function not in _OPERATIONS or not known:
        shown = ", ".join(operand.describe() for operand in operands)
        raise state.unsupported("data-dependent-value", f"{function.__name__} of {shown}")
    examples = [_example_of(state, operand) for operand in operands]
    try:
        example = function(*examples)
    except ArithmeticError as error:
        raise state.unsupported("data-dependent-value", f"{function.__name__} may raise: {error}") from None
    if type(example) not in (int, float):
        raise state.unsupported(
            "data-dependent-value", f"{function.__name__} gives a {type(example).__name__}"
        )
    arguments = tuple(operand.graph_argument(state) for operand in operands)
    return ScalarValue(state.add_scalar_node("call_function", function, arguments, example), example)


def _stays_open(state: CaptureState, function: Any, operand: Value) -> bool:
    """Whether an open float may be part of it: powers of what is not positive may be complex."""
    return _is_open_float(operand) and (
        function is not operator.pow or compare_numbers(state, ">", operator.gt, operand, ConstantValue(0))
    )


def _is_open_float(operand: Value) -> bool:
    return isinstance(operand, SymbolicNumber) and operand.python_type() is float


def _example_of(state: CaptureState, operand: Value) -> float | int:
    if isinstance(operand, ScalarValue):
        return operand.example
    if isinstance(operand, SymbolicNumber) and _is_open_float(operand):
        return operand.example(state)
    assert isinstance(operand, ConstantValue)
    return operand.value
