"""Unary and binary operators over all families."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.numpy_arrays.arrays import ArrayValue, operate
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.conditions import combined
from gradsplit.compile_core.capture.open_numbers.extremes import beside
from gradsplit.compile_core.capture.open_numbers.scalars import compute_scalar
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import (
    SymbolicNumber,
    are_numbers,
    binary_number,
    negate_number,
)
from gradsplit.compile_core.capture.operations.special_methods import (
    asking_torch,
    is_not_implemented,
    of_metaclass,
    special_call,
    special_method,
)
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, ask_python, fold
from gradsplit.compile_core.capture.values.containers import Item, ListValue, SequenceValue
from gradsplit.compile_core.capture.values.deques import DequeValue
from gradsplit.compile_core.capture.values.mappings import DictValue, DictView, ReadOnlyView
from gradsplit.compile_core.capture.values.sets import OPERATORS as SET_OPERATORS
from gradsplit.compile_core.capture.values.sets import SetValue, as_set
from gradsplit.compile_core.capture.values.stand_ins import StandIn
from gradsplit.compile_core.capture.values.tensors import OPERATOR_STEMS, TensorValue

# BINARY_OP's text: the function, the methods on the left, on the right.
BINARY: dict[str, tuple[Callable[..., Any], str, str]] = {
    symbol: (getattr(operator, f"__{stem}__"), f"__{stem}__", f"__r{stem}__")
    for symbol, stem in OPERATOR_STEMS.items()
}
IN_PLACE = {f"{symbol}=": getattr(operator, f"__i{stem}__") for symbol, stem in OPERATOR_STEMS.items()}
UNARY: dict[str, tuple[Callable[..., Any], str]] = {
    "-": (operator.neg, "__neg__"),
    "+": (operator.pos, "__pos__"),
    "~": (operator.invert, "__invert__"),
}


def binary(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    """``left symbol right`` for one of BINARY or IN_PLACE."""
    function, *methods = BINARY[symbol.rstrip("=")]
    methods.append(f"__i{methods[0][2:]}")
    run = functools.partial(_binary, state, symbol)
    return asking_torch(state, IN_PLACE.get(symbol, function), methods, [left, right], run)


def _binary(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    written = symbol
    if symbol in IN_PLACE:
        changed = _in_place(state, symbol, left, right)
        if changed is not None:
            return changed
        symbol = symbol[:-1]
    right = beside(symbol, left, right)
    function, method, reflected = BINARY[symbol]
    array = operate(state, function, left, right)
    if array is not None:
        return array
    if isinstance(left, InstanceValue) or isinstance(right, InstanceValue):
        return _of_instances(state, written, left, right)
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        return state.call_tensor_op("call_function", function, [left, right], {})
    scalar = compute_scalar(state, function, [left, right])
    if scalar is not None:
        return scalar
    if are_numbers(left, right):
        return binary_number(state, symbol, function, left, right)
    special = of_metaclass(state, left, right, method, reflected)
    if special is None:
        special = _of_containers(state, symbol, left, right)
    if special is not None:
        return special
    if symbol == "%" and isinstance(left, ConstantValue) and isinstance(left.value, str):
        return fill_in(state, left.value, right)
    return fold(state, function, [left, right], {})


def _of_instances(state: CaptureState, written: str, left: Value, right: Value) -> Value:
    """An operator where a class of the program is involved."""
    symbol = written[:-1] if written in IN_PLACE else written
    _, method, reflected = BINARY[symbol]
    special = special_method(state, left, right, method, reflected)
    if special is not None:
        return special
    contents = [side.content if isinstance(side, InstanceValue) else side for side in (left, right)]
    if None not in contents:
        return binary(state, symbol, *contents)  # type: ignore[arg-type]
    if symbol == "%" and isinstance(left, ConstantValue) and isinstance(left.value, str):
        return fill_in(state, left.value, right)
    for sequence, times in ((left, right), (right, left)) if symbol == "*" else ():
        is_sequence = issubclass(sequence.python_type(), (list, tuple, str, bytes))
        index = special_call(state, times, "__index__", []) if is_sequence else None
        if index is not None:
            return binary(state, symbol, sequence, index)
    shown = ("** or pow()" if symbol == "**" else symbol) + "=" * (written in IN_PLACE)
    kinds = " and ".join(f"{side.python_type().__name__!r}" for side in (left, right))
    raise state.raise_exception(TypeError, f"unsupported operand type(s) for {shown}: {kinds}")


def _of_containers(state: CaptureState, symbol: str, left: Value, right: Value) -> Value | None:
    """Sums and multiples of sequences, algebra of sets, union of dictionaries."""
    sequences = [isinstance(side, SequenceValue) for side in (left, right)]
    numbers = [issubclass(side.python_type(), int) for side in (left, right)]
    if (symbol == "+" and all(sequences)) or (symbol == "*" and any(sequences) and any(numbers)):
        return _of_sequences(state, BINARY[symbol][0], left, right)
    if symbol == "|" and isinstance(left, DictValue) and isinstance(right, DictValue):
        return _union(state, left, right)
    views = [isinstance(side, DictView) and side.what != "values" for side in (left, right)]
    if symbol in SET_OPERATORS and any(views):
        return as_set(state, left, set).call_method(state, SET_OPERATORS[symbol][0], [right], {})
    if symbol in SET_OPERATORS and isinstance(left, SetValue) and isinstance(right, SetValue):
        return left.call_method(state, SET_OPERATORS[symbol][0], [right], {})
    return None


def _union(state: CaptureState, left: DictValue, right: DictValue) -> Value:
    """``left | right``: a subclass answers for a plain dictionary, on whichever side it stands."""
    merged = left.do_copy(state)
    assert isinstance(merged, DictValue)
    other = right.mapping if isinstance(right, ReadOnlyView) else right
    if merged.cls is dict and other.cls is not dict:
        merged.cls, merged.default_factory = other.cls, other.default_factory
    merged.do_update(state, right)
    return merged


def _in_place(state: CaptureState, symbol: str, left: Value, right: Value) -> Value | None:
    """``left symbol right`` where the left operand changes itself; None where it has no such operator."""
    if isinstance(left, ArrayValue):
        return None if left.is_scalar else operate(state, IN_PLACE[symbol], left, right)
    if isinstance(left, TensorValue) and not isinstance(right, InstanceValue):
        return state.call_tensor_op("call_function", IN_PLACE[symbol], [left, right], {})
    if isinstance(left, InstanceValue):
        result = special_call(state, left, f"__i{OPERATOR_STEMS[symbol[:-1]]}__", [right])
        return None if result is None or is_not_implemented(result) else result
    if isinstance(left, ListValue):
        if symbol == "+=" and not isinstance(right, (TensorValue, InstanceValue)):
            left.do_extend(state, right)
            return left
        if symbol == "*=" and isinstance(right, ConstantValue):
            left.in_python(state, "__imul__", right)
            return left
        if isinstance(right, (TensorValue, InstanceValue)):
            raise state.unsupported("operator", f"{symbol} of {left.describe()} and {right.describe()}")
    if isinstance(left, ReadOnlyView) and symbol == "|=":
        raise state.raise_exception(TypeError, "'|=' is not supported by mappingproxy; use '|' instead")
    if isinstance(left, DictValue) and symbol == "|=":
        left.do_update(state, right)
        return left
    both_sets = isinstance(left, SetValue) and left.cls is set and isinstance(right, (SetValue, DictView))
    if both_sets and symbol[:-1] in SET_OPERATORS:
        left.call_method(state, SET_OPERATORS[symbol[:-1]][1], [right], {})
        return left
    return None


def _of_sequences(state: CaptureState, function: Callable[..., Any], *sides: Value) -> Value:
    held = [
        side.python_object(side.all(state)) if isinstance(side, SequenceValue) else state.as_index(side)
        for side in sides
    ]
    made = ask_python(state, function, *held)
    if isinstance(made, collections.deque):
        return DequeValue(list(made), made.maxlen)
    if isinstance(made, list):
        return ListValue(made)
    # The type of a sum or a multiple of torch.Size differs between versions of torch, so torch is asked.
    empty = [
        torch.Size() if side.python_type() is torch.Size else type(part)()
        for side, part in zip(sides, held, strict=True)
    ]
    return SequenceValue(list(made), type(function(*empty)))


def fill_in(state: CaptureState, pattern: str, arguments: Value) -> Value:
    """``pattern % arguments``; objects of the program have texts of their own."""
    try:
        return fold(state, operator.mod, [ConstantValue(pattern), ConstantValue(arguments.as_constant())], {})
    except NotConstant:
        pass
    items: Sequence[Item] = [arguments]
    if isinstance(arguments, DictValue) or issubclass(arguments.python_type(), (tuple, dict)):
        if not isinstance(arguments, SequenceValue):
            raise state.unsupported("text", f"a pattern filled in with {arguments.describe()}")
        items = arguments.all(state)
    stand_ins = tuple(StandIn(state, item) for item in items)
    return state.from_constant(pattern % stand_ins)


def negation(state: CaptureState, operand: Value) -> Value:
    """``not operand``."""
    opposite = combined(torch.sym_not, operand)
    return ConstantValue(not operand.truth(state)) if opposite is None else opposite


def unary(state: CaptureState, symbol: str, operand: Value) -> Value:
    function, method = UNARY[symbol]
    return asking_torch(state, function, [method], [operand], functools.partial(_unary, state, symbol))


def _unary(state: CaptureState, symbol: str, operand: Value) -> Value:
    function, method = UNARY[symbol]
    array = operate(state, function, operand)
    if array is not None:
        return array
    if isinstance(operand, TensorValue):
        return state.call_tensor_op("call_function", function, [operand], {})
    if isinstance(operand, InstanceValue):
        found = special_call(state, operand, method, [])
        if found is not None:
            return found
        shown = f"bad operand type for unary {symbol}: {operand.cls.__name__!r}"
        raise state.raise_exception(TypeError, shown)
    scalar = compute_scalar(state, function, [operand])
    if scalar is not None:
        return scalar
    if isinstance(operand, SymbolicNumber) and symbol != "~":
        return operand if symbol == "+" else negate_number(state, operand)
    return fold(state, function, [operand], {})
