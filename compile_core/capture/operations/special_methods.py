"""Special methods of the program's classes and metaclasses: which of two operands answers, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.classes import OWN_OF_PYTHON, ClassValue
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.objects import InstanceValue, bind_class_entry
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def special_call(state: CaptureState, value: Value, name: str, args: list[Value]) -> Value | None:
    """What a special method gives that the class of a value defines in Python; None where it defines none."""
    if not isinstance(value, InstanceValue):
        return None
    owner, entry = find_class_entry(state, value.cls, name)
    if owner in (None, object) or (value.content is None and isinstance(entry, OWN_OF_PYTHON)):
        return None
    if entry is None:
        return ConstantValue(NotImplemented)
    assert owner is not None
    return bind_class_entry(state, value, value.cls, owner, name, entry).call(state, args, {})


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
    kinds = [kind for kind in (side.python_type() for side in operands) if issubclass(kind, torch.Tensor)]
    owners = [find_class_entry(state, kind, name)[0] for kind in kinds for name in methods]
    if kinds and all(owner is None or is_library_object(owner) for owner in owners):
        return state.through_overrides(function, operands, {}, lambda given, named: run(*given))
    return run(*operands)


def plain_content(value: Value) -> Value | None:
    """What a built-in operator works on: the value, or the content of an object; None where there is none."""
    if not isinstance(value, InstanceValue):
        return value
    return value.content


def of_metaclass(state: CaptureState, left: Value, right: Value, method: str, reflected: str) -> Value | None:
    """An operator on classes that their metaclass defines in Python."""
    for owner, other, name in ((left, right, method), (right, left, reflected)):
        if isinstance(owner, ClassValue):
            result = owner.call_metaclass(state, name, [other])
            if result is not None and not is_not_implemented(result):
                return result
    return None


class StandIn:
    """Stands for an object in Python's own formatting and gives the text that the program would make."""

    def __init__(self, state: CaptureState, value: Value) -> None:
        self.state = state
        self.value = value

    def __str__(self) -> str:
        return str(self.state.text_of(self.value).as_constant())

    def __repr__(self) -> str:
        return str(self.state.representation_of(self.value).as_constant())

    def __format__(self, spec: str) -> str:
        return str(self.state.format_of(self.value, ConstantValue(spec)).as_constant())

    def __getattr__(self, name: str) -> object:
        raise self.state.unsupported("text", f"the attribute {name!r} of {self.value.describe()} in a text")

    def __getitem__(self, key: object) -> object:
        raise self.state.unsupported("text", f"an item of {self.value.describe()} in a text")

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def _number(self) -> float:
        real = self.value.as_constant() if isinstance(self.value, ConstantValue) else None
        if not isinstance(real, (int, float)):
            raise self.state.unsupported("text", f"{self.value.describe()} as a number in a text")
        return real
