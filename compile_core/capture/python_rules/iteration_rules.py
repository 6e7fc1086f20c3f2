"""Rules for the built-in functions that go through an iterable."""

from __future__ import annotations

import functools
import math
from contextlib import suppress
from typing import Any

import torch

from gradsplit.compile_core.capture.frames.generators import stop_iteration
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.extremes import extreme
from gradsplit.compile_core.capture.open_numbers.scalars import ScalarValue, compute_scalar
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicInt, is_of_data
from gradsplit.compile_core.capture.operations import comparisons, operators
from gradsplit.compile_core.capture.operations.special_methods import special_call
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, answer_to, answers, rule_of_each
from gradsplit.compile_core.capture.values.constants import (
    ConstantValue,
    SequenceIterator,
    fold,
    is_none,
)
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, sorted_values
from gradsplit.compile_core.capture.values.mappings import DictValue, DictView
from gradsplit.compile_core.capture.values.sets import SetValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.errors import Unsupported


@answer_to(reversed)
def _reversed(state: CaptureState, sequence: Value) -> Any:
    own = special_call(state, sequence, "__reversed__", [])
    if own is not None:
        return own
    if isinstance(sequence, SequenceValue):
        return SequenceIterator(list(reversed(sequence.all(state))), reversed)
    if isinstance(sequence, ConstantValue) and isinstance(sequence.value, (range, str, bytes)):
        return SequenceIterator([ConstantValue(item) for item in reversed(sequence.value)], reversed)
    if isinstance(sequence, DictValue):
        return sequence.do___reversed__(state)
    if isinstance(sequence, DictView):
        return SequenceIterator(state.items_of(sequence)[::-1], type(reversed({})))
    if isinstance(sequence, InstanceValue) and hasattr(sequence.cls, "__getitem__"):
        items = [sequence.get_item(state, ConstantValue(i)) for i in reversed(range(sequence.length(state)))]
        return SequenceIterator(list(items), reversed)
    if isinstance(sequence, TensorValue):
        raise state.unsupported("reversed", f"reversed() of {sequence.describe()}")
    raise state.raise_exception(TypeError, f"{sequence.python_type().__name__!r} object is not reversible")


@answer_to(next)
def _next(state: CaptureState, iterator: Value, *default: Value) -> Any:
    if not hasattr(iterator.python_type(), "__next__"):
        name = iterator.python_type().__name__
        raise state.raise_exception(TypeError, f"{name!r} object is not an iterator")
    item = iterator.advance(state)
    if item is not None:
        return item
    if default:
        iterator.returned()
        return default[0]
    raise stop_iteration(state, iterator)


@answer_to(sorted)
def _sorted(
    state: CaptureState, iterable: Value, *, key: Value | None = None, reverse: Value | None = None
) -> Any:
    if isinstance(iterable, SetValue) and key is None:
        items = iterable.arranged()  # the order of the set does not matter
    else:
        items = state.items_of(iterable)
    return ListValue(list(sorted_values(state, items, key, reverse)))


def _has_open_int(items: list[Value]) -> bool:
    """Whether items are integers of which some are symbolic; arithmetic one by one is exact then."""
    is_open = any(isinstance(item, SymbolicInt) for item in items)
    return is_open and all(item.python_type() is int for item in items)


@answer_to(sum)
def _sum(state: CaptureState, iterable: Value, start: Value | None = None) -> Any:
    items = state.items_of(iterable)
    if start is None and not _has_open_int(items):
        with suppress(NotConstant):
            # Since 3.12 the sum of floats is compensated, which adding one by one would not be.
            constants = [item.as_constant() for item in items]
            return fold(state, lambda: sum(constants), [], {})
    result = ConstantValue(0) if start is None else start
    for item in items:
        result = operators.binary(state, "+", result, item)
    return result


@answer_to(math.prod)
def _product_of_all(state: CaptureState, iterable: Value, *, start: Value | None = None) -> Any:
    first = ConstantValue(1) if start is None else start
    items = state.items_of(iterable)
    values = [first, *items]
    if not _has_open_int(values) and all(isinstance(item, ConstantValue) for item in values):
        return fold(state, lambda begin, *reals: math.prod(reals, start=begin), values, {})
    for item in items:
        first = operators.binary(state, "*", first, item)
    return first


# By what they compare, and the operation on two numbers that graphs have for what depends on data.
_EXTREMES: dict[Any, tuple[str, Any]] = {min: ("<", torch.sym_min), max: (">", torch.sym_max)}


def _extremum_of_pair(state: CaptureState, function: Any, pair: list[Value]) -> Value:
    _, of_numbers = _EXTREMES[function]
    if any(map(is_of_data, pair)) and all(item.python_type() is int for item in pair):
        numbers = [item.number if isinstance(item, SymbolicInt) else item.as_constant() for item in pair]
        return state.from_constant(of_numbers(*numbers))
    result = compute_scalar(state, of_numbers, pair)
    return CALL_RULES[function](state, pair, {}) if result is None else result


@rule_of_each(*_EXTREMES)
def _extremum(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if set(kwargs) - {"key", "default"}:
        raise TypeError("unknown keyword argument")
    items = state.items_of(args[0]) if len(args) == 1 else args
    if not items:
        if "default" in kwargs:
            return kwargs["default"]
        return fold(state, lambda: function(()), [], {})  # raises, in this version's words
    key = kwargs.get("key", ConstantValue(None))
    if is_none(key) and any(isinstance(item, ScalarValue) or is_of_data(item) for item in items):
        return functools.reduce(lambda one, other: _extremum_of_pair(state, function, [one, other]), items)
    keys = items if is_none(key) else [key.call(state, [item], {}) for item in items]
    best = 0
    for index in range(1, len(items)):
        try:
            if comparisons.compare(state, _EXTREMES[function][0], keys[index], keys[best]).truth(state):
                best = index
        except Unsupported:
            found = extreme(state, function, items) if keys is items else None
            if found is None:
                raise
            return found
    return items[best]


def _has_item(state: CaptureState, iterable: Value, truth: bool) -> bool:
    """Whether an item has this truth value; those after the first that has are not taken."""
    iterator = iterable.iterate(state)
    while (item := iterator.advance(state)) is not None:
        if item.truth(state) == truth:
            return True
    return False


answers(
    {
        any: lambda state, iterable: _has_item(state, iterable, True),
        all: lambda state, iterable: not _has_item(state, iterable, False),
    }
)
