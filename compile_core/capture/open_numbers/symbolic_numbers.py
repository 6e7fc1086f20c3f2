"""Numbers that may differ at the next call: integers over the symbols of the capture, and floats made of them.

A symbolic number is a constant on demand: whoever asks for its ``value``, as a dictionary key or a loop over ``range``
does, gets it, at the price of the condition that it stays this value. So every rule for constants holds for symbolic
numbers, and the rules here are those that keep a number open.

Integers are expressions of the ShapeEnv, whose arithmetic is exact. Floats are not: an algebraic simplification may
round otherwise than the program does, so a float keeps the program's own operations, to be done in the same order.

Of floats that the program was given, torch knows nothing: the ShapeEnv could not tell nan from other values nor 0.0
from -0.0. Fake tensors see the float of this call, so only operations whose results look the same for every float take
such a number (``open_floats``).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gradsplit.compile_core.capture.open_numbers.conditions import condition_value
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.sources import Source
from gradsplit.compile_core.torch_facts.symbolic_numbers import depends_on_data

Names = Callable[[Source], str]


class SymbolicNumber(ConstantValue):
    """The base of all. ``number`` is torch's SymInt or SymFloat, or the float of this call where torch knows nothing of
    it; ``weight`` counts the operations."""

    number: Any
    weight = 1

    @property
    def is_known(self) -> bool:
        """Whether ``number`` is but the float of this call."""
        return isinstance(self.number, float)

    @property
    def value(self) -> Any:
        """The number of this call, which it then has to be at every call of the entry."""
        raise NotImplementedError

    def python_type(self) -> type:
        return self.cls

    def truth(self, state: CaptureState) -> bool:
        return compare_numbers(state, "!=", operator.ne, self, ConstantValue(self.cls(0)))

    def text(self, state: CaptureState, names: Names) -> str:
        """The number as Python over its sources; may use ``math``."""
        raise NotImplementedError

    def example(self, state: CaptureState) -> Any:
        """The number of this call, without any condition."""
        raise NotImplementedError

    def sources(self, state: CaptureState) -> list[Source]:
        """Where the numbers lie that this one is made of."""
        raise NotImplementedError

    def describe(self) -> str:
        return f"a {self.python_type().__name__} that differs between calls ({self.number})"


class SymbolicInt(SymbolicNumber):
    """An integer over the symbols; ``source`` if it existed before the call."""

    cls = int

    def __init__(self, number: torch.SymInt, source: Source | None = None) -> None:
        self.number = number
        self.source = source

    @property
    def value(self) -> int:
        try:
            return int(self.number)
        except GuardOnDataDependentSymNode:
            raise Unsupported(
                "data-dependent-value",
                f"a use of {self.describe()} that needs its value",
                "keep it in a tensor",
            ) from None

    def graph_argument(self, state: CaptureState) -> Any:
        try:
            return state.graph.number(state.sizes.expression(self.number))
        except NotImplementedError:
            return self.value

    def text(self, state: CaptureState, names: Names) -> str:
        if self.source is not None:
            return names(self.source)
        try:
            return f"({state.sizes.text(state.sizes.expression(self.number), names)})"
        except NotImplementedError:
            return repr(self.value)

    def example(self, state: CaptureState) -> int:
        if depends_on_data(self.number):
            return self.value
        return int(state.sizes.value_of(state.sizes.expression(self.number)))

    def sources(self, state: CaptureState) -> list[Source]:
        if self.source is not None:
            return [self.source]
        return state.sizes.sources(state.sizes.expression(self.number))


class FloatInput(SymbolicNumber):
    """A float that existed before the call. Where it ``never_stays``, it gives no ``value``."""

    cls = float

    def __init__(self, state: CaptureState, source: Source, number: float, never_stays: bool = False) -> None:
        self.source: Source = source
        self.number = number
        self._state = state
        self._never_stays = never_stays

    @property
    def value(self) -> float:
        if self._never_stays:
            raise self._state.unsupported("opaque-object", f"a use of {self.describe()} that needs its value")
        self._state.guards.constant(self.source, self.number)
        return self.number

    def graph_argument(self, state: CaptureState) -> Any:
        try:
            return state.graph.float_input(self.source, self.number, lambda: self.value)
        except NotImplementedError:
            return self.value

    def text(self, state: CaptureState, names: Names) -> str:
        return names(self.source)

    def example(self, state: CaptureState) -> float:
        return self.number

    def sources(self, state: CaptureState) -> list[Source]:
        return [self.source]


class SymbolicFloat(SymbolicNumber):
    """What one operation gives for numbers of which some are symbolic.

    ``form`` is the operation as Python, with ``{0}`` … for the operands.
    """

    cls = float

    def __init__(
        self, function: Callable[..., Any], form: str, operands: list[ConstantValue], number: Any = None
    ) -> None:
        self.function = function
        self.form = form
        self.operands = operands
        self.number = function(*(_number(operand) for operand in operands)) if number is None else number
        self.weight = 1 + sum(operand.weight for operand in operands if isinstance(operand, SymbolicNumber))
        self._nodes: dict[Any, Any] = {}

    @property
    def value(self) -> float:
        return self.function(*(operand.value for operand in self.operands))

    @property
    def is_simple(self) -> bool:
        """Whether there is but one operation, of integers, so that nothing can be simplified."""
        only_operation = not any(isinstance(operand, SymbolicFloat) for operand in self.operands)
        return only_operation and not self.is_known

    def graph_argument(self, state: CaptureState) -> Any:
        found = self._nodes.get(state.graph)
        if found is None:
            arguments = tuple(operand.graph_argument(state) for operand in self.operands)
            if not any(isinstance(argument, fx.Node) for argument in arguments):
                return self.function(*arguments)
            found = state.graph.number_operation(self.function, arguments, self.number)
            self._nodes[state.graph] = found
            if self.is_known:
                state.graph.open_floats[found] = lambda: self.value
        return found

    def text(self, state: CaptureState, names: Names) -> str:
        return self.form.format(*(_text(state, operand, names) for operand in self.operands))

    def example(self, state: CaptureState) -> float:
        return self.function(*(example_of(state, operand) for operand in self.operands))

    def sources(self, state: CaptureState) -> list[Source]:
        found = [
            source
            for operand in self.operands
            if isinstance(operand, SymbolicNumber)
            for source in operand.sources(state)
        ]
        return list(dict.fromkeys(found))


def _number(operand: ConstantValue) -> Any:
    return operand.number if isinstance(operand, SymbolicNumber) else operand.value


def _text(state: CaptureState, operand: ConstantValue, names: Names) -> str:
    return operand.text(state, names) if isinstance(operand, SymbolicNumber) else f"({operand.value!r})"


def example_of(state: CaptureState, operand: Any) -> Any:
    """The number of this call, without any condition."""
    return operand.example(state) if isinstance(operand, SymbolicNumber) else operand.value


def are_numbers(*values: Value) -> bool:
    """Whether all are finite integers and floats, and one at least is symbolic."""
    return any(isinstance(value, SymbolicNumber) for value in values) and all(
        isinstance(value, SymbolicNumber)
        or (
            isinstance(value, ConstantValue)
            and type(value.value) in (int, float)
            and abs(value.value) <= sys.float_info.max
        )
        for value in values
    )


def _is_int(value: Value) -> bool:
    return value.python_type() is int


def binary_number(
    state: CaptureState, symbol: str, function: Callable[..., Any], left: Value, right: Value
) -> Value:
    """``left symbol right`` where one is a symbolic number."""
    if not are_numbers(left, right) or not _stays_open(state, symbol, left, right):
        return fold(state, function, [left, right], {})
    assert isinstance(left, ConstantValue) and isinstance(right, ConstantValue)
    if _is_int(left) and _is_int(right) and symbol != "/" and not (symbol == "**" and right.value < 0):
        # Torch makes one of nested quotients, which is right for positive divisors alone.
        turns = symbol == "//" and compare_numbers(state, "<", operator.lt, right, ConstantValue(0))
        numbers = (-_number(side) if turns else _number(side) for side in (left, right))
        return state.from_constant(function(*numbers))
    number = None
    is_known = any(isinstance(operand, SymbolicNumber) and operand.is_known for operand in (left, right))
    if is_known or (symbol == "**" and not _is_int(left)):
        number = function(example_of(state, left), example_of(state, right))
    elif symbol == "**":
        number = torch.sym_float(_number(left)) ** float(right.value)
    return _float_of(state, function, f"({{0}} {symbol} {{1}})", [left, right], number)


# Texts repeat what occurs several times, so a loop of ``rate = rate * rate`` must come to an end.
_MOST_OPERATIONS = 100


def _float_of(
    state: CaptureState,
    function: Callable[..., Any],
    form: str,
    operands: list[ConstantValue],
    number: Any = None,
) -> Value:
    """A further operation on floats; the value of this call where there are too many."""
    made = SymbolicFloat(function, form, operands, number)
    return made if made.weight <= _MOST_OPERATIONS else ConstantValue(made.value)


def _stays_open(state: CaptureState, symbol: str, left: Value, right: Value) -> bool:
    """Whether an operation has a rule; it also makes the conditions under which the operation raises nothing."""
    if symbol in ("+", "-", "*"):
        return True
    if symbol in ("//", "%"):
        return _is_int(left) and _is_int(right) and right.truth(state)
    if symbol == "/":
        return right.truth(state)
    if symbol == "**":
        if not _is_int(left):
            return _has_power(state, left, right)
        if isinstance(right, SymbolicNumber) or not isinstance(left, SymbolicInt):
            return False
        whole = _is_int(right) and right.as_constant() >= 0
        return whole or compare_numbers(state, ">", operator.gt, left, ConstantValue(0))
    return False


def _has_power(state: CaptureState, base: Value, exponent: Value) -> bool:
    """Whether a power of a float is a float, without an overflow: of shares of something, or one that is known."""
    assert isinstance(exponent, ConstantValue)
    if isinstance(exponent, SymbolicNumber):
        within = compare_numbers(state, ">=", operator.ge, exponent, ConstantValue(0))
        return within and _lies_between(state, base, 0, 1)
    power, least, most = float(exponent.value), 0.0, 1.0
    if power > 0:
        most = (sys.float_info.max ** (1 / max(power, 1))) * 0.99
        least = -most if power.is_integer() else 0.0
    elif power < 0:
        least, most = max(sys.float_info.max ** (1 / power) * 1.01, sys.float_info.min), sys.float_info.max
    return _lies_between(state, base, least, most)


def _lies_between(state: CaptureState, number: Value, least: Any, most: Any) -> bool:
    above = least is None or compare_numbers(state, ">=", operator.ge, number, ConstantValue(least))
    return above and (most is None or compare_numbers(state, "<=", operator.le, number, ConstantValue(most)))


def negate_number(state: CaptureState, operand: SymbolicNumber) -> Value:
    if isinstance(operand, SymbolicInt):
        return state.from_constant(-operand.number)
    return _float_of(state, operator.neg, "(-{0})", [operand])


def compare_numbers(
    state: CaptureState, symbol: str, function: Callable[..., Any], left: Value, right: Value
) -> bool:
    """The answer of a comparison, with the condition that it stays."""
    return compare_open(state, symbol, function, left, right).truth(state)


def compare_open(
    state: CaptureState, symbol: str, function: Callable[..., Any], left: Value, right: Value
) -> Value:
    """A comparison as a value, which stays open where it depends on data."""
    assert isinstance(left, ConstantValue) and isinstance(right, ConstantValue)
    if not are_numbers(left, right):
        return ConstantValue(bool(function(left.value, right.value)))
    if _is_int(left) and _is_int(right):
        return condition_value(function(_number(left), _number(right)))
    holds = bool(function(example_of(state, left), example_of(state, right)))
    sources = [
        source for side in (left, right) if isinstance(side, SymbolicNumber) for source in side.sources(state)
    ]
    sources = list(dict.fromkeys(sources))

    def shown(names: Names) -> str:
        text = f"{_text(state, left, names)} {symbol} {_text(state, right, names)}"
        return text if holds else f"not {text}"

    state.guards.written(sources, shown)
    return ConstantValue(holds)


def is_of_data(value: Value) -> bool:
    """Whether a number of the program is known only when the graph has read data."""
    if isinstance(value, SymbolicInt):
        return depends_on_data(value.number)
    return isinstance(value, SymbolicFloat) and any(map(is_of_data, value.operands))


def open_probability(state: CaptureState, value: Value) -> Value:
    """A number that may stay open as a probability between 0 and 1; one of these is known."""
    if not isinstance(value, SymbolicNumber) or value.python_type() is not float:
        return value
    inside = compare_numbers(state, "<", operator.lt, ConstantValue(0.0), value)
    inside = inside and compare_numbers(state, "<", operator.lt, value, ConstantValue(1.0))
    return value if inside else ConstantValue(value.value)


def call_with_numbers(
    state: CaptureState, function: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]
) -> Value | None:
    """A call of a pure function whose result can stay open; None where there is no such rule."""
    if function is math.pow and len(args) == 2 and are_numbers(*args) and not _is_int(args[0]):
        return binary_number(state, "**", operator.pow, *args) if _has_power(state, *args) else None
    if kwargs or not args or not isinstance(args[0], SymbolicNumber):
        return None
    operand = args[0]
    if len(args) == 2 and function is divmod:
        parts = [
            binary_number(state, "//", operator.floordiv, *args),
            binary_number(state, "%", operator.mod, *args),
        ]
        return SequenceValue(list(parts), tuple)
    if len(args) != 1:
        return None
    if function in _TO_INTEGER:
        return _to_integer(state, function, operand)
    if function is float:
        is_int = isinstance(operand, SymbolicInt)
        return SymbolicFloat(torch.sym_float, "float({0})", [operand]) if is_int else operand
    if function is math.isfinite:
        return ConstantValue(_is_finite(state, operand))
    if function is math.isnan:
        return ConstantValue(compare_numbers(state, "!=", operator.ne, operand, operand))
    if function is math.isinf:
        is_finite = _is_finite(state, operand)
        return ConstantValue(not is_finite and compare_numbers(state, "==", operator.eq, operand, operand))
    if function is abs and operand.is_known:
        return _float_of(state, operator.abs, "abs({0})", [operand])  # -0.0 and nan have signs
    if function is abs:
        positive = compare_numbers(state, ">=", operator.ge, operand, ConstantValue(0))
        return operand if positive else negate_number(state, operand)
    finite = function in (math.sin, math.cos, math.tanh) and _is_finite(state, operand)
    if finite or (function in _RANGES and _lies_between(state, operand, *_RANGES[function])):
        name = f"math.{function.__name__}({{0}})"
        if function is math.sqrt:
            return _float_of(state, torch.sym_sqrt, name, [operand])
        return _float_of(state, function, name, [operand], function(operand.example(state)))
    return None


def _is_finite(state: CaptureState, operand: SymbolicNumber) -> bool:
    if isinstance(operand, SymbolicInt):
        return True
    return _lies_between(state, operand, -sys.float_info.max, sys.float_info.max)


# Between which numbers these raise nothing.
_RANGES: dict[Any, tuple[Any, Any]] = {math.sqrt: (0, None), math.exp: (None, 709), math.log: (5e-324, None)}
_TO_INTEGER = (int, round, operator.index, math.floor, math.ceil, math.trunc)


def _to_integer(state: CaptureState, function: Callable[..., Any], operand: SymbolicNumber) -> Value | None:
    if isinstance(operand, SymbolicInt):
        return operand
    if isinstance(operand, SymbolicFloat) and operand.is_simple and function is not operator.index:
        return state.from_constant((math.trunc if function is int else function)(operand.number))
    return None
