"""Unary, binary and comparison operators over all families."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from compile_core.capture.base import CaptureState, NotConstant, Value
from compile_core.capture.constants import ConstantValue, fold, is_none
from compile_core.capture.containers import ListValue, SequenceValue
from compile_core.capture.functions import BoundMethodValue
from compile_core.capture.mappings import DictValue, SetValue
from compile_core.capture.numpy_arrays import ArrayValue, operate
from compile_core.capture.objects import InstanceValue, bind_class_entry, find_class_entry
from compile_core.capture.references import ReferenceValue
from compile_core.capture.scalars import compute_scalar
from compile_core.capture.symbolic_numbers import (
    SymbolicNumber,
    are_numbers,
    binary_number,
    compare_numbers,
    negate_number,
)
from compile_core.capture.tensors import TensorValue

# BINARY_OP's text: the function, the methods on the left, on the right.
BINARY: dict[str, tuple[Callable[..., Any], str, str]] = {
    "+": (operator.add, "__add__", "__radd__"),
    "-": (operator.sub, "__sub__", "__rsub__"),
    "*": (operator.mul, "__mul__", "__rmul__"),
    "/": (operator.truediv, "__truediv__", "__rtruediv__"),
    "//": (operator.floordiv, "__floordiv__", "__rfloordiv__"),
    "%": (operator.mod, "__mod__", "__rmod__"),
    "**": (operator.pow, "__pow__", "__rpow__"),
    "@": (operator.matmul, "__matmul__", "__rmatmul__"),
    "&": (operator.and_, "__and__", "__rand__"),
    "|": (operator.or_, "__or__", "__ror__"),
    "^": (operator.xor, "__xor__", "__rxor__"),
    "<<": (operator.lshift, "__lshift__", "__rlshift__"),
    ">>": (operator.rshift, "__rshift__", "__rrshift__"),
}
IN_PLACE: dict[str, Callable[..., Any]] = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "@=": operator.imatmul,
    "&=": operator.iand,
    "|=": operator.ior,
    "^=": operator.ixor,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
}
COMPARE: dict[str, tuple[Callable[..., Any], str, str]] = {
    "==": (operator.eq, "__eq__", "__eq__"),
    "!=": (operator.ne, "__ne__", "__ne__"),
    "<": (operator.lt, "__lt__", "__gt__"),
    "<=": (operator.le, "__le__", "__ge__"),
    ">": (operator.gt, "__gt__", "__lt__"),
    ">=": (operator.ge, "__ge__", "__le__"),
}
UNARY: dict[str, tuple[Callable[..., Any], str]] = {
    "-": (operator.neg, "__neg__"),
    "+": (operator.pos, "__pos__"),
    "~": (operator.invert, "__invert__"),
}


def binary(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    """``left symbol right`` for one of BINARY or IN_PLACE."""
    if symbol in IN_PLACE:
        changed = _in_place(state, symbol, left, right)
        if changed is not None:
            return changed
        symbol = symbol[:-1]
    function, method, reflected = BINARY[symbol]
    array = operate(state, function, left, right)
    if array is not None:
        return array
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        if isinstance(left, InstanceValue) or isinstance(right, InstanceValue):
            raise state.unsupported("operator", f"{symbol} of {left.describe()} and {right.describe()}")
        return state.call_tensor_op("call_function", function, [left, right], {})
    scalar = compute_scalar(state, function, [left, right])
    if scalar is not None:
        return scalar
    special = _special(state, left, right, method, reflected)
    if special is not None:
        return special
    if are_numbers(left, right):
        return binary_number(state, symbol, function, left, right)
    if symbol == "+" and isinstance(left, SequenceValue) and isinstance(right, SequenceValue):
        if left.cls is list and right.cls is list:
            return ListValue([*left.all(state), *right.all(state)])
        if (
            issubclass(left.cls, tuple)
            and issubclass(right.cls, tuple)
            and hasattr(left.cls, "_fields") is False
        ):
            return _concatenate(state, left, right)
    if symbol == "*":
        for sequence, times in ((left, right), (right, left)):
            count = times.value if isinstance(times, ConstantValue) else None
            if isinstance(sequence, SequenceValue) and isinstance(count, int):
                items = sequence.all(state) * count
                if sequence.cls is list:
                    return ListValue(list(items))
                if sequence.cls is tuple:
                    return SequenceValue(list(items), tuple)
    if (
        symbol == "|"
        and isinstance(left, DictValue)
        and isinstance(right, DictValue)
        and left.cls is right.cls is dict
    ):
        merged = left.copy(state)
        assert isinstance(merged, DictValue)
        merged.update(state, right)
        return merged
    if symbol == "|" and isinstance(left, ReferenceValue):
        raise state.unsupported("operator", "a union of types")
    if symbol == "%" and isinstance(left, ConstantValue) and isinstance(left.value, str):
        return fold(state, function, [left, right], {})
    return fold(state, function, [left, right], {})


def _in_place(state: CaptureState, symbol: str, left: Value, right: Value) -> Value | None:
    """``left symbol right`` where the left operand changes itself; None where it has no such operator."""
    if isinstance(left, ArrayValue):
        return operate(state, IN_PLACE[symbol], left, right)
    if isinstance(left, TensorValue):
        return state.call_tensor_op("call_function", IN_PLACE[symbol], [left, right], {})
    if isinstance(left, InstanceValue):
        name = f"__i{BINARY[symbol[:-1]][1][2:]}"
        owner, entry = find_class_entry(state, left.cls, name)
        if owner is None:
            return None
        result = bind_class_entry(state, left, left.cls, owner, name, entry).call(state, [right], {})
        is_answer = not _is_not_implemented(result)
        return result if is_answer else None
    if isinstance(left, ListValue):
        if symbol == "+=" and not isinstance(right, (TensorValue, InstanceValue)):
            left.extend(state, right)
            return left
        if symbol == "*=" and isinstance(right, ConstantValue):
            return left.repeat(state, right)
        if isinstance(right, (TensorValue, InstanceValue)):
            raise state.unsupported("operator", f"{symbol} of {left.describe()} and {right.describe()}")
    if isinstance(left, DictValue) and symbol == "|=":
        left.update(state, right)
        return left
    if isinstance(left, SetValue) and left.cls is set:
        raise state.unsupported("operator", f"{symbol} of {left.describe()}")
    return None


def _concatenate(state: CaptureState, left: SequenceValue, right: SequenceValue) -> Value:
    items = [*left.all(state), *right.all(state)]
    if left.cls is right.cls is tuple:
        return SequenceValue(list(items), tuple)
    # torch.Size + torch.Size differs between torch versions (tuple or Size), so torch is asked.
    return SequenceValue(list(items), type(left.cls(()) + right.cls(())))


def _special(state: CaptureState, left: Value, right: Value, method: str, reflected: str) -> Value | None:
    """A user's operator method; None where neither operand has one."""
    for owner, other, name in ((left, right, method), (right, left, reflected)):
        if isinstance(owner, InstanceValue):
            defining, _ = find_class_entry(state, owner.cls, name)
            if defining is None or defining is object:
                continue
            found = owner.get_attribute(state, name)
            if not isinstance(found, BoundMethodValue):
                raise state.unsupported("operator", f"{name} of {owner.describe()}")
            result = found.call(state, [other], {})
            if _is_not_implemented(result):
                continue
            return result
    return None


def _is_not_implemented(value: Value) -> bool:
    return isinstance(value, ConstantValue) and value.python_type() is type(NotImplemented)


def unary(state: CaptureState, symbol: str, operand: Value) -> Value:
    function, method = UNARY[symbol]
    array = operate(state, function, operand)
    if array is not None:
        return array
    if isinstance(operand, TensorValue):
        return state.call_tensor_op("call_function", function, [operand], {})
    if isinstance(operand, InstanceValue):
        return operand.get_attribute(state, method).call(state, [], {})
    scalar = compute_scalar(state, function, [operand])
    if scalar is not None:
        return scalar
    if isinstance(operand, SymbolicNumber) and symbol != "~":
        return operand if symbol == "+" else negate_number(state, operand)
    return fold(state, function, [operand], {})


def compare(state: CaptureState, symbol: str, left: Value, right: Value) -> Value:
    function, method, reflected = COMPARE[symbol]
    array = operate(state, function, left, right)
    if array is not None:
        return array
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        none = [side for side in (left, right) if is_none(side)]
        if none and symbol in ("==", "!="):
            return ConstantValue(symbol == "!=")
        return state.call_tensor_op("call_function", function, [left, right], {})
    special = _special(state, left, right, method, reflected)
    if special is not None:
        return special
    if are_numbers(left, right):
        return ConstantValue(compare_numbers(state, symbol, function, left, right))
    if symbol == "==":
        return ConstantValue(equal(state, left, right))
    if symbol == "!=":
        return ConstantValue(not equal(state, left, right))
    return fold(state, function, [left, right], {})


def equal(state: CaptureState, left: Value, right: Value) -> bool:
    """``left == right`` with Python's identity shortcut of containers for values without data."""
    if any(
        isinstance(side, ConstantValue) and issubclass(side.python_type(), np.dtype) for side in (left, right)
    ):
        compared = operate(state, operator.eq, left, right)
        return compared is not None and compared.truth(state)
    if left is not right and (isinstance(left, ArrayValue) or isinstance(right, ArrayValue)):
        raise state.unsupported("array-equality", "a comparison of containers whose items are arrays")
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        if left is right:
            return True  # containers compare by identity first
        if any(is_none(side) for side in (left, right)):
            return False
        raise state.unsupported("tensor-equality", "a comparison of containers whose items are tensors")
    if isinstance(left, SequenceValue) and isinstance(right, SequenceValue):
        kinds = [tuple if issubclass(side.cls, tuple) else list for side in (left, right)]
        if kinds[0] is not kinds[1] or len(left.items) != len(right.items):
            return False
        pairs = zip(left.all(state), right.all(state), strict=True)
        return all(equal(state, one, other) for one, other in pairs)
    if isinstance(left, DictValue) and isinstance(right, DictValue):
        left.guard_keys(state)
        right.guard_keys(state)
        if set(left.entries) != set(right.entries):
            return False
        return all(equal(state, left.get(state, key), right.get(state, key)) for key in left.entries)
    special = _special(state, left, right, "__eq__", "__eq__")
    if special is not None:
        return special.truth(state)
    if are_numbers(left, right):
        return compare_numbers(state, "==", operator.eq, left, right)
    if left is right and not isinstance(left, ConstantValue):
        return True
    try:
        return bool(left.as_constant() == right.as_constant())
    except NotConstant:
        pass
    by_identity = left.python_type().__eq__ is right.python_type().__eq__ is object.__eq__
    if by_identity and isinstance(left, InstanceValue) and isinstance(right, (InstanceValue, ReferenceValue)):
        return is_same(state, left, right)
    identities = (InstanceValue, ReferenceValue)
    if isinstance(left, ReferenceValue) and isinstance(right, ReferenceValue):
        return bool(left.real is right.real)
    plain = (ConstantValue, SequenceValue, DictValue, SetValue)
    if (isinstance(left, identities) and isinstance(right, plain)) or (
        isinstance(right, identities) and isinstance(left, plain)
    ):
        return False
    if isinstance(left, plain) and isinstance(right, plain) and type(left) is not type(right):
        return False
    raise state.unsupported("equality", f"{left.describe()} == {right.describe()}")


def is_same(state: CaptureState, left: Value, right: Value) -> bool:
    """``left is right``."""
    if left is right:
        return True
    if isinstance(left, SymbolicNumber) and left.python_type() is not right.python_type():
        return False
    if isinstance(right, SymbolicNumber) and left.python_type() is not right.python_type():
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
    if isinstance(left, BoundMethodValue) or isinstance(right, BoundMethodValue):
        raise state.unsupported("identity", "`is` between methods")
    immutable = isinstance(left, SequenceValue) and issubclass(left.cls, tuple)
    if immutable and isinstance(right, SequenceValue) and issubclass(right.cls, tuple):
        raise state.unsupported("identity", "`is` between tuples")
    if isinstance(left, TensorValue) and isinstance(right, TensorValue) and left.source and right.source:
        state.guards.distinct(left.source, right.source)
        return False
    if left.source is not None and right.source is not None:
        state.guards.distinct(left.source, right.source)
    return False
