"""Rules for the built-in functions that ask an object for its hash, identity, number, names."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import torch

from gradsplit.compile_core.capture.numpy_arrays.arrays import operate
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.existing_objects import PythonModuleValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.scalars import whole_number
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import call_with_numbers
from gradsplit.compile_core.capture.operations import operators
from gradsplit.compile_core.capture.operations.special_methods import special_call
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, answer_to, rule_of_each
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import ListValue
from gradsplit.compile_core.capture.values.hash_keys import ComputedKey, IdentityValue
from gradsplit.compile_core.capture.values.tensors import METHOD_RULES, TensorValue, refuse_unseen

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


# The special methods that a function of numbers asks an object for. What the first gives is the answer, what another
# does is a number to ask again.
_SPECIAL: dict[Any, tuple[str, ...]] = {
    int: ("__int__", "__index__"),
    float: ("__float__", "__index__"),
    complex: ("__complex__", "__float__", "__index__"),
    abs: ("__abs__",),
    round: ("__round__",),
    math.floor: ("__floor__",),
    math.ceil: ("__ceil__",),
    math.trunc: ("__trunc__",),
    bytes: ("__bytes__",),
    operator.index: ("__index__",),
}
_REFLECTED: dict[Any, tuple[str, str]] = {divmod: ("__divmod__", "__rdivmod__"), pow: ("__pow__", "__rpow__")}
# Functions of whole numbers, which an object may stand for.
_OF_WHOLE_NUMBERS = (range, hex, oct, bin, chr)
_PURE = [
    ord,
    int.from_bytes,
    str.maketrans,
    bytes.maketrans,
    sys.intern,
    *_SPECIAL,
    *_REFLECTED,
    *_OF_WHOLE_NUMBERS,
]
_PURE += [value for name, value in vars(math).items() if callable(value) and name != "prod"]


def _of_objects(state: CaptureState, function: Any, args: list[Value]) -> Value | None:
    """What the program's own classes say; None where the function is to be asked, of what is left of the arguments."""
    for at, name in enumerate(_SPECIAL.get(function, ())):
        found = special_call(state, args[0], name, [] if at else args[1:]) if args else None
        if found is not None:
            return CALL_RULES[function](state, [found], {}) if at else found
    for index, name in enumerate(_REFLECTED.get(function, ())):
        others = [*args[1:]] if index == 0 else [args[0]]
        found = special_call(state, args[index], name, others) if index < len(args) else None
        if found is not None:
            return found
    if function in _OF_WHOLE_NUMBERS:
        args[:] = [special_call(state, value, "__index__", []) or value for value in args]
    elif function in _SPECIAL and args and isinstance(args[0], InstanceValue) and args[0].content is not None:
        args[0] = args[0].content
    return None


def _of_tensors(state: CaptureState, function: Any, args: list[Value]) -> Value | None:
    if function in (int, float) and isinstance(args[0], TensorValue):
        refuse_unseen(state, function)
        rule = METHOD_RULES.get(f"__{function.__name__}__")
        found = None if rule is None else rule(state, args[0])
        if found is None:
            shown = f"{function.__name__}() of {args[0].describe()} depends on its data"
            raise state.unsupported("data-dependent-value", shown, "keep the value in a tensor")
        return found
    if function is int and len(args) == 1:
        return whole_number(state, args[0])
    if function is abs and issubclass(args[0].python_type(), torch.Tensor):
        return args[0].call_method(state, "abs", [], {})
    if function is pow and any(isinstance(argument, TensorValue) for argument in args):
        return operators.binary(state, "**", *args)
    return operate(state, operator.abs, *args) if function is abs else None


@rule_of_each(*_PURE)
def _pure(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    given = [*args]
    found = _of_objects(state, function, given)
    if found is None and given:
        found = _of_tensors(state, function, given)
    if found is not None:
        return found
    return call_with_numbers(state, function, given, kwargs) or fold(state, function, given, kwargs)
