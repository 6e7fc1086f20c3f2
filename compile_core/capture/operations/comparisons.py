"""Comparison operators, equality and identity over all families."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.numpy_arrays.arrays import ArrayValue, operate
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.object_model.opaque import OpaqueValue
from gradsplit.compile_core.capture.open_numbers.scalars import compare_scalar
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import (
    SymbolicNumber,
    are_numbers,
    compare_numbers,
    compare_open,
)
from gradsplit.compile_core.capture.operations.special_methods import (
    asking_torch,
    of_metaclass,
    special_method,
)
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.hash_keys import IdentityValue
from gradsplit.compile_core.capture.values.mappings import DictValue, DictView
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.sets import SetValue, as_set
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.errors import Unsupported

COMPARE: dict[str, tuple[Callable[..., Any], str, str]] = {
    "==": (operator.eq, "__eq__", "__eq__"),
    "!=": (operator.ne, "__ne__", "__ne__"),
    "<": (operator.lt, "__lt__", "__gt__"),
    "<=": (operator.le, "__le__", "__ge__"),
    ">": (operator.gt, "__gt__", "__lt__"),
    ">=": (operator.ge, "__ge__", "__le__"),
}


def compare(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    """``left symbol right`` for one of COMPARE."""
    function, *methods = COMPARE[symbol]
    return asking_torch(state, function, methods, [left, right], functools.partial(_compare, state, symbol))


def _compare(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    function, method, reflected = COMPARE[symbol]
    left, right = left.settle(state), right.settle(state)
    array = operate(state, function, left, right)
    if array is not None:
        return array
    if isinstance(left, InstanceValue) or isinstance(right, InstanceValue):
        return _of_instances(state, symbol, left, right)
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        none = [side for side in (left, right) if is_none(side)]
        if none and symbol in ("==", "!="):
            return ConstantValue(symbol == "!=")
        return state.call_tensor_op("call_function", function, [left, right], {})
    scalar = compare_scalar(state, symbol, function, left, right)
    if scalar is not None:
        return scalar
    if are_numbers(left, right):
        return compare_open(state, symbol, function, left, right)
    special = of_metaclass(state, left, right, method, reflected)
    if special is not None:
        return special
    if symbol in ("==", "!="):
        return ConstantValue(_equal(state, left, right) == (symbol == "=="))
    if _is_set(left) and _is_set(right):
        sides = [set(as_set(state, side).members) for side in (left, right)]
        return ConstantValue(function(*sides))
    if isinstance(left, SequenceValue) and isinstance(right, SequenceValue) and _kind(left) is _kind(right):
        return _lexicographic(state, symbol, left, right)
    return fold(state, function, [left, right], {})


def _of_instances(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    """A comparison where a class of the program is involved."""
    _, method, reflected = COMPARE[symbol]
    special = special_method(state, left, right, method, reflected)
    if special is None and symbol == "!=":
        # ``object.__ne__`` is the opposite of the class's own ``__eq__``.
        same = special_method(state, left, right, "__eq__", "__eq__")
        special = None if same is None else ConstantValue(not same.truth(state))
    if special is not None:
        return special
    if symbol in ("==", "!="):
        return ConstantValue(_same_object(state, left, right) == (symbol == "=="))
    kinds = " and ".join(f"{side.python_type().__name__!r}" for side in (left, right))
    message = f"{symbol!r} not supported between instances of {kinds}"
    raise state.raise_exception(TypeError, message)


def _same_object(state: CaptureState, left: Value, right: Value) -> bool:
    """``object.__eq__``, and that of namespaces, which compare their attributes."""
    sides = (left, right)
    if all(isinstance(side, InstanceValue) and issubclass(side.cls, types.SimpleNamespace) for side in sides):
        return equal(state, *(side.get_attribute(state, "__dict__") for side in sides))
    return is_same(state, left, right)


def _lexicographic(state: CaptureState, symbol: str, left: SequenceValue, right: SequenceValue) -> Value:
    for one, other in zip(left.all(state), right.all(state), strict=False):
        if not same_item(state, one, other):
            return compare(state, symbol, one, other)
    return ConstantValue(COMPARE[symbol][0](len(left.items), len(right.items)))


def _is_set(value: Value) -> bool:
    return isinstance(value, SetValue) or (isinstance(value, DictView) and value.what != "values")


def _kind(value: SequenceValue) -> type:
    return tuple if issubclass(value.cls, tuple) else value.cls


def same_item(state: CaptureState, one: Value, other: Value) -> bool:
    """How containers compare items: by identity first."""
    if one is other or equal(state, one, other):
        return True
    if _is_nan(state, one) and _is_nan(state, other):
        raise state.unsupported("identity", "whether two nan in containers are one object")
    return False


def _is_nan(state: CaptureState, value: Value) -> bool:
    if isinstance(value, SymbolicNumber):
        return value.python_type() is float and not compare_numbers(state, "==", operator.eq, value, value)
    return isinstance(value, ConstantValue) and isinstance(value.value, float) and value.value != value.value


def equal(state: CaptureState, left: Value, right: Value) -> bool:
    """``left == right`` where the answer is known, which it is not for tensors."""
    left, right = left.settle(state), right.settle(state)
    if left is right and isinstance(left, (ArrayValue, TensorValue)):
        return True  # containers compare by identity first
    if isinstance(left, ArrayValue) or isinstance(right, ArrayValue):
        raise state.unsupported("array-equality", "a comparison of containers whose items are arrays")
    if (isinstance(left, TensorValue) or isinstance(right, TensorValue)) and not (
        is_none(left) or is_none(right)
    ):
        raise state.unsupported("tensor-equality", "a comparison of containers whose items are tensors")
    return _compare(state, "==", left, right).truth(state)


def _equal(state: CaptureState, left: Value, right: Value) -> bool:
    """The same of what no operator of tensors, of numbers, or of a class of the program answers."""
    if isinstance(left, SequenceValue) and isinstance(right, SequenceValue):
        if _kind(left) is not _kind(right) or len(left.items) != len(right.items):
            return False
        pairs = zip(left.all(state), right.all(state), strict=True)
        return all(same_item(state, one, other) for one, other in pairs)
    if isinstance(left, DictValue) and isinstance(right, DictValue):
        return _equal_dicts(state, left, right)
    if _is_set(left) and _is_set(right):
        return set(as_set(state, left).members) == set(as_set(state, right).members)
    if isinstance(left, IdentityValue) and isinstance(right, IdentityValue):
        return is_same(state, left.value, right.value)
    if isinstance(left, BoundMethodValue) and isinstance(right, BoundMethodValue):
        return is_same(state, left.owner, right.owner) and equal(state, left.function, right.function)
    if left is right and not isinstance(left, ConstantValue):
        return True
    try:
        return bool(left.as_constant() == right.as_constant())
    except NotConstant:
        pass
    if isinstance(left, ReferenceValue) and isinstance(right, ReferenceValue):
        return _equal_references(state, left, right)
    for side in (left, right):
        if isinstance(side, (OpaqueValue, ReferenceValue)) and not _compares_by_identity(side):
            raise _unknown(state, left, right)
    plain = (ConstantValue, SequenceValue, DictValue, SetValue)
    if isinstance(left, plain) != isinstance(right, plain):
        if issubclass((right if isinstance(left, plain) else left).python_type(), _BY_VALUE):
            raise _unknown(state, left, right)
        return False
    if isinstance(left, plain) and isinstance(right, plain) and type(left) is not type(right):
        return False
    kinds = [side.python_type() for side in (left, right)]
    if all(map(_has_identity, kinds)) and not all(issubclass(kind, _BOUND_IN_C) for kind in kinds):
        return is_same(state, left, right)
    raise _unknown(state, left, right)


# Types whose objects may equal literals and containers, however the capture knows them.
_BY_VALUE = (complex, float, int, str, bytes, list, tuple, dict, set, frozenset)
# Built-in functions are equal if they are one, bound to one object.
_BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)


def _equal_references(state: CaptureState, left: ReferenceValue, right: ReferenceValue) -> bool:
    sides = (left, right)
    if left.real is right.real:
        return True
    if all(isinstance(side.real, _BOUND_IN_C) for side in sides):
        return bool(left.real == right.real)
    if all(map(_compares_by_identity, sides)):
        return False
    raise _unknown(state, left, right)


def _compares_by_identity(value: OpaqueValue | ReferenceValue) -> bool:
    """Whether ``==`` between this and an object of another kind asks nothing but whether they are one object."""
    return _has_identity(type(value.real))


def _has_identity(cls: type) -> bool:
    return cls.__eq__ is object.__eq__ or issubclass(cls, _BOUND_IN_C)


def _unknown(state: CaptureState, left: Value, right: Value) -> Unsupported:
    return state.unsupported("equality", f"{left.describe()} == {right.describe()}")


def _equal_dicts(state: CaptureState, left: DictValue, right: DictValue) -> bool:
    left.guard_keys(state)
    right.guard_keys(state)
    if set(left.entries) != set(right.entries):
        return False
    if left.cls is right.cls is collections.OrderedDict and list(left.entries) != list(right.entries):
        return False
    return all(same_item(state, left.get(state, key), right.get(state, key)) for key in left.entries)


def is_same(state: CaptureState, left: Value, right: Value) -> bool:
    """``left is right``."""
    if left is right:
        return True
    left, right = left.settle(state), right.settle(state)
    numbers = isinstance(left, SymbolicNumber) or isinstance(right, SymbolicNumber)
    if numbers and left.python_type() is not right.python_type():
        return False
    if isinstance(left, ConstantValue) and isinstance(right, ConstantValue):
        one, other = left.value, right.value
        if one is other:
            return True
        singletons = (type(None), bool, type(Ellipsis), type(NotImplemented))
        if type(one) is not type(other) or isinstance(one, singletons):
            return False
        if one != other:
            return False
        raise state.unsupported("identity", f"`is` between the equal constants {one!r}")
    if isinstance(left, ConstantValue) or isinstance(right, ConstantValue):
        return False
    if isinstance(left, ReferenceValue) and isinstance(right, ReferenceValue):
        return left.real is right.real
    if isinstance(left, BoundMethodValue) and isinstance(right, BoundMethodValue):
        raise state.unsupported("identity", "`is` between methods")
    if isinstance(left, SequenceValue) and isinstance(right, SequenceValue) and issubclass(left.cls, tuple):
        # Python may make one object of equal literals, and two sources may lead to one object.
        made = [side.source is None and not side.is_literal for side in (left, right)]
        if right.cls is not left.cls or (any(made) and left.items and right.items):
            return False
        raise state.unsupported("identity", "`is` between tuples")
    if left.source is not None and right.source is not None:
        state.guards.distinct(left.source, right.source)
    return False
