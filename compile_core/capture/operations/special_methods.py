"""Special methods of the program's classes and metaclasses: which of two operands answers, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.objects import OWN_OF_PYTHON, InstanceValue, call_class_entry
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def special_call(state: CaptureState, value: Value, name: str, args: list[Value]) -> Value | None:
    """What a special method gives that the class of a value defines in Python; None where it defines none."""
    if not isinstance(value, InstanceValue):
        return None
    if find_class_entry(state, value.cls, name)[1] is None:
        return ConstantValue(NotImplemented)
    own = OWN_OF_PYTHON if value.content is None else ()
    return call_class_entry(state, value, value.cls, name, args, but=own)


def is_not_implemented(value: Value) -> bool:
    return value.python_type() is type(NotImplemented)


def special_method(
    state: CaptureState, left: Value, right: Value, method: str, reflected: str
) -> Value | None:
    """The answer of an operator's methods in Python's order; None where no class of the program has one."""
    sides = [(left, right, method), (right, left, reflected)]
    one, other = left.python_type(), right.python_type()
    if one is other and method not in _COMPARISONS:
        sides = sides[:1]
    elif (
        issubclass(other, one)
        and find_class_entry(state, other, reflected)[1] is not find_class_entry(state, one, reflected)[1]
    ):
        sides.reverse()  # a subclass that has its own method is asked first
    for owner, argument, name in sides:
        if isinstance(owner, TensorValue) and hasattr(argument.python_type(), "__torch_function__"):
            raise state.unsupported("operator", f"{name} of {owner.describe()} and {argument.describe()}")
        result = special_call(state, owner, name, [argument])
        if result is not None and not is_not_implemented(result):
            return result
    return None


def asking_torch(
    state: CaptureState,
    function: Any,
    methods: Sequence[str],
    operands: list[Value],
    run: Callable[..., Value],
) -> Value:
    """``run`` of the operands of an operator, before which torch may ask others: of a tensor, for which no class of the
    program has one of these methods."""
    if not state.overriding:
        return run(*operands)
    kinds = [kind for kind in (side.python_type() for side in operands) if issubclass(kind, torch.Tensor)]
    owners = [find_class_entry(state, kind, name)[0] for kind in kinds for name in methods]
    if kinds and all(owner is None or is_library_object(owner) for owner in owners):
        return state.through_overrides(function, operands, {}, lambda given, named: run(*given))
    return run(*operands)


def of_metaclass(state: CaptureState, left: Value, right: Value, method: str, reflected: str) -> Value | None:
    """An operator on classes that their metaclass defines in Python."""
    for owner, other, name in ((left, right, method), (right, left, reflected)):
        if isinstance(owner, ClassValue):
            result = owner.call_metaclass(state, name, [other])
            if result is not None and not is_not_implemented(result):
                return result
    return None
