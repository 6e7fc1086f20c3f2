"""Python numbers that are known only when the graph runs: read out of a tensor, and what is computed from them.

Such a number is a node of the graph as tensors are, and every Python operation on it is a node too, so the graph
computes with the same double precision, in the same order, as the program. What decides about control flow or
about shapes cannot be such a number.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from gradsplit.compile_core.capture.open_numbers.known_numbers import decision_by
from gradsplit.compile_core.capture.open_numbers.open_floats import takes_open_floats, takes_probability
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import (
    SymbolicNumber,
    compare_numbers,
    example_of,
)
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.capture.values.view_copies import nodes_in
from gradsplit.compile_core.ir.sources import Source

# No power, difference or quotient that programs form of it is zero.
_EXAMPLE = 0.375


@dataclass(eq=False, repr=False)
class ScalarValue(Value):
    """A number in the graph. ``example`` has its type; its value is made up.

    ``value`` is that of this call, if the program may compare the number: it lies in a tensor that nobody has changed
    yet, of the CPU at ``source``, which is the price of a guard, or made of ones or zeros in the frame.
    """

    node: fx.Node
    example: float | int
    value: float | int | None = None
    source_of_value: Source | None = None

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
    node = state.add_scalar_node("call_method", "item", (tensor.node,), example)
    if tensor.node.target in _FILLED and tensor.fake._version == 0:
        return ScalarValue(node, example, type(example)(_FILLED[tensor.node.target]))
    changed = [state.graph.is_changed(record) for record in state.graph.records if record.node is tensor.node]
    if tensor.source is None or tensor.real is None or tensor.fake.device.type != "cpu" or changed != [False]:
        return ScalarValue(node, example)
    return ScalarValue(node, example, tensor.real.item(), tensor.source)


_FILLED: dict[Any, int] = {torch.ones: 1, torch.zeros: 0}


def compare_scalar(
    state: CaptureState, symbol: str, function: Any, left: Value, right: Value
) -> Value | None:
    """A comparison with such a number, which is guarded; None where there is none.

    Raises:
        Unsupported: the number is not known.
    """
    number, other = (left, right) if isinstance(left, ScalarValue) else (right, left)
    if not isinstance(number, ScalarValue):
        return None
    if number.value is None or not isinstance(other, ConstantValue):
        shown = f"{left.describe()} {symbol} {right.describe()}"
        known = None
        if isinstance(other, ConstantValue):
            real, is_left = other.value, number is left
            known = decision_by(
                state,
                number.node,
                lambda found: bool(function(found, real) if is_left else function(real, found)),
                shown,
                keeps_order=symbol not in ("==", "!="),
            )
        if known is None:
            raise state.unsupported("data-dependent-branch", shown, "keep the value in a tensor")
        return ConstantValue(known)
    operands = (number.value, other.value) if number is left else (other.value, number.value)
    value = function(*operands)
    if number.source_of_value is not None:
        sides = ["{0}.item()", "{c0}"] if number is left else ["{c0}", "{0}.item()"]
        condition, source = f"({f' {symbol} '.join(sides)}) is {value}", number.source_of_value
        state.guards.add([source], condition, [other.value], condition.format(source, c0=other.value))
    return ConstantValue(value)


def only_computes(state: CaptureState) -> bool:
    """Whether the code that runs is torch's and does nothing else with the numbers that it reads."""
    return state.calling_module().startswith(("torch.optim.", "torch.nn.modules.batchnorm"))


def check_scalars(state: CaptureState, target: Any, args: Any) -> None:
    """Refuse a number that the program has read where more than elements may depend on it, as ``arange``'s length."""
    if takes_open_floats(target) and not takes_probability(target):
        return
    for node in nodes_in(args):
        is_float = type(node.meta["example_value"]) is float and node not in state.graph.open_floats
        is_read = node.target == "item" and isinstance(node.meta["example_value"], (int, float))
        if (is_float or is_read) and not only_computes(state):
            raise state.unsupported("data-dependent-value", f"{target} of a number that depends on data")


def whole_number(state: CaptureState, value: Value) -> Value | None:
    """``int()`` of such a float: an integer that depends on data, as sizes may; None of anything else."""
    if not isinstance(value, ScalarValue) or not isinstance(value.example, float):
        return None
    known = decision_by(state, value.node, math.trunc, f"int({value.describe()})", keeps_order=True)
    if known is not None:
        return ConstantValue(known)
    number = state.sizes.shape_env.create_unbacked_symint()
    node = state.add_scalar_node("call_function", math.trunc, (value.node,), number)
    node.meta["is_pure"] = True
    state.graph.data_sizes.note(node)
    return state.from_constant(number)


def is_number_in_tensor(value: Value) -> TypeGuard[TensorValue]:
    """Whether torch takes a tensor for the number that it holds: one without dims and gradients."""
    if not isinstance(value, TensorValue):
        return False
    return value.fake.dim() == 0 and not value.fake.requires_grad and value.fake.dtype.is_floating_point


_OPERATIONS = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg),
        *(torch.sym_max, torch.sym_min, float),
    ]
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
    examples = [
        operand.example if isinstance(operand, ScalarValue) else example_of(state, operand)
        for operand in operands
    ]
    try:
        example = function(*examples)
        if type(example) is complex and _is_not_negative(state, operands[0]):
            example = function(-examples[0], *examples[1:])
    except ArithmeticError as error:
        raise state.unsupported("data-dependent-value", f"{function.__name__} may raise: {error}") from None
    if type(example) not in (int, float):
        raise state.unsupported(
            "data-dependent-value", f"{function.__name__} gives a {type(example).__name__}"
        )
    arguments = tuple(operand.graph_argument(state) for operand in operands)
    assert not isinstance(example, complex)
    return ScalarValue(state.add_scalar_node("call_function", function, arguments, example), example)


def _is_not_negative(state: CaptureState, base: Value) -> bool:
    """Whether a number is none whose root is complex, which is guarded."""
    found = compare_scalar(state, ">=", operator.ge, base, ConstantValue(0))
    return found is not None and found.truth(state)


def _stays_open(state: CaptureState, function: Any, operand: Value) -> bool:
    """Whether an open float may be part of it: powers of what is not positive may be complex."""
    return _is_open_float(operand) and (
        function is not operator.pow or compare_numbers(state, ">", operator.gt, operand, ConstantValue(0))
    )


def _is_open_float(operand: Value) -> bool:
    return isinstance(operand, SymbolicNumber) and operand.python_type() is float
