"""Rules for the built-in functions that ask an object for its hash, identity, number, names."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.existing_objects import PythonModuleValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import call_with_numbers
from gradsplit.compile_core.capture.operations import operator_rules
from gradsplit.compile_core.capture.operations.special_methods import special_call
from gradsplit.compile_core.capture.python_rules import builtin_rules
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import ListValue
from gradsplit.compile_core.capture.values.hash_keys import ComputedKey, IdentityValue

# Some rules below ask the object first and else do what the rule for literals does.
assert builtin_rules and operator_rules


answer_to(id)(lambda state, value: IdentityValue(value))


@answer_to(hash)
def _hash(state: CaptureState, value: Value) -> Any:
    key = value.hash_key(state)
    if isinstance(key, ComputedKey):
        return ConstantValue(hash(key))
    try:
        return ConstantValue(hash(value.as_constant()))
    except NotConstant:
        raise state.unsupported(
            "hash", f"the hash of {value.describe()} is another one at each run"
        ) from None


@answer_to(dir)
def _dir(state: CaptureState, value: Value) -> Any:
    cls = value.python_type()
    if isinstance(value, (ClassValue, PythonModuleValue)):
        place = state.reference_source(value.real.__name__, value.real)
        names = dir(value.real)
        state.guards.add([place], "dir({0}) == {c0}", [names], f"the names of {value.real.__name__}")
    elif cls.__dictoffset__ != 0 or cls.__dir__ is not object.__dir__:
        raise state.unsupported("dir", f"dir() of {value.describe()}")
    else:
        names = dir(cls)
    return ListValue([ConstantValue(name) for name in names])


def _number_rule(function: Callable[..., Any], name: str) -> CallRule:
    """A built-in function that asks an object's special method; of literals it is folded."""
    earlier = CALL_RULES.get(function)

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if args and isinstance(args[0], InstanceValue):
            found = special_call(state, args[0], name, args[1:])
            if found is None and name in ("__int__", "__float__", "__complex__"):
                others = ["__float__", "__index__"] if function is complex else ["__index__"]
                tried = (special_call(state, args[0], other, []) for other in others)
                found = next((number for number in tried if number is not None), None)
                found = None if found is None else call(state, [found], {})
            if found is not None:
                return found
            if args[0].content is not None:
                args = [args[0].content, *args[1:]]
        if earlier is not None:
            return earlier(state, args, kwargs)
        return call_with_numbers(state, function, args, kwargs) or fold(state, function, args, kwargs)

    return call


for _function, _name in (
    (int, "__int__"),
    (float, "__float__"),
    (complex, "__complex__"),
    (abs, "__abs__"),
    (round, "__round__"),
    (math.floor, "__floor__"),
    (math.ceil, "__ceil__"),
    (math.trunc, "__trunc__"),
    (bytes, "__bytes__"),
    (operator.index, "__index__"),
):
    CALL_RULES[_function] = _number_rule(_function, _name)


def _reflected_rule(function: Callable[..., Any], method: str, reflected: str) -> CallRule:
    earlier = CALL_RULES[function]

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        for index, name in ((0, method), (1, reflected)):
            others = [*args[1:]] if index == 0 else [args[0]]
            found = special_call(state, args[index], name, others) if index < len(args) else None
            if found is not None:
                return found
        return earlier(state, args, kwargs)

    return call


CALL_RULES[divmod] = _reflected_rule(divmod, "__divmod__", "__rdivmod__")
CALL_RULES[pow] = _reflected_rule(pow, "__pow__", "__rpow__")


def _indexed_rule(function: Callable[..., Any]) -> CallRule:
    """Functions of whole numbers, which an object may stand for."""

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        numbers = [special_call(state, value, "__index__", []) or value for value in args]
        return call_with_numbers(state, function, numbers, kwargs) or fold(state, function, numbers, kwargs)

    return call


for _function in (range, hex, oct, bin, chr):
    CALL_RULES[_function] = _indexed_rule(_function)
