"""Rules for the built-in functions that read, store and delete attributes by name, and for those of ``object``."""

from __future__ import annotations

import functools
import types
from typing import Any

from gradsplit.compile_core.capture.object_model.classes import ClassValue, new_instance
from gradsplit.compile_core.capture.object_model.content import CONTENT_BASES, content_base
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, answer_to, answers, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue, sequence_fields


def _name(state: CaptureState, value: Value) -> str:
    name = value.as_constant() if isinstance(value, ConstantValue) else None
    if not isinstance(name, str):
        raise state.unsupported("attribute-name", f"{value.describe()} as the name of an attribute")
    return name


answers(
    {
        hasattr: lambda state, owner, name: owner.has_attribute(state, _name(state, name)),
        setattr: lambda state, owner, name, value: owner.set_attribute(state, _name(state, name), value),
        delattr: lambda state, owner, name: owner.delete_attribute(state, _name(state, name)),
        types.MethodType: lambda state, function, owner: BoundMethodValue(function, owner),
        vars: lambda state, owner: owner.get_attribute(state, "__dict__"),
        object.__setattr__: lambda state, owner, name, value: _plain_instance(
            state, owner, "__setattr__"
        ).store(state, _name(state, name), value),
        object.__delattr__: lambda state, owner, name: _plain_instance(state, owner, "__delattr__").remove(
            state, _name(state, name)
        ),
    }
)


@answer_to(getattr)
def _getattr(state: CaptureState, owner: Value, name: Value, *default: Value) -> Any:
    try:
        return owner.get_attribute(state, _name(state, name))
    except SymbolicRaise as raised:
        if default and issubclass(raised.value.python_type(), AttributeError):
            return default[0]
        raise


@call_rule(type.__call__)
def _type_call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, *rest = args
    if not isinstance(cls, ClassValue):
        raise TypeError(f"type.__call__ of {cls.describe()}")
    return cls.instantiate(state, rest, kwargs)


@call_rule(types.SimpleNamespace.__init__)
def _fill_namespace(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (owner,) = args
    for name, value in kwargs.items():
        owner.set_attribute(state, name, value)
    return ConstantValue(None)


def _plain_instance(state: CaptureState, owner: Value, method: str) -> InstanceValue:
    """The owner of a call of one of ``object``'s own methods."""
    if isinstance(owner, InstanceValue):
        return owner
    raise state.unsupported("object-method", f"object.{method} of {owner.describe()}")


@answer_to(object.__getattribute__)
def _object_getattribute(state: CaptureState, owner: Value, name: Value) -> Any:
    instance = _plain_instance(state, owner, "__getattribute__")
    found = instance.plain_attribute(state, _name(state, name))
    if found is None:
        shown = f"{instance.cls.__name__!r} object has no attribute {_name(state, name)!r}"
        raise state.raise_exception(AttributeError, shown)
    return found


def _new(base: type, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, *rest = args
    if not isinstance(cls, ClassValue):
        raise TypeError(f"{base.__name__}.__new__ of {cls.describe()}")
    if base is tuple and sequence_fields(cls.real):
        return SequenceValue([*(state.items_of(rest[0]) if rest else [])], cls.real)
    if content_base(cls.real) is None and base is not object:
        return cls.call(state, rest, kwargs)
    return new_instance(state, cls.real, rest, kwargs)


for _base in (object, *CONTENT_BASES):
    CALL_RULES[_base.__new__] = functools.partial(_new, _base)
