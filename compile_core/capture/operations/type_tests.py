"""``isinstance`` and ``issubclass``."""

from __future__ import annotations

import abc
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.objects import (
    InstanceValue,
    bind_class_entry,
    names_another_class,
)
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, ask_python, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, type_name

answer_to(isinstance)(lambda state, value, classes: is_instance(state, value, classes))


@answer_to(issubclass)
def _issubclass(state: CaptureState, value: Value, classes: Value) -> Any:
    if not isinstance(value, ClassValue):
        raise state.raise_exception(TypeError, "issubclass() arg 1 must be a class")
    for wanted in _classes(state, classes, issubclass):
        own = _own_test(state, wanted, "__subclasscheck__", value)
        if _is_subclass(state, value.real, wanted) if own is None else own:
            return ConstantValue(True)
    return ConstantValue(False)


@answer_to(type.__instancecheck__)
def _plain_instance_check(state: CaptureState, cls: Value, value: Value) -> Any:
    if not isinstance(cls, ClassValue):
        raise TypeError("type.__instancecheck__ of something else than a class")
    return ConstantValue(_is_plain_instance(state, value, cls.real))


@answer_to(type.__subclasscheck__)
def _plain_subclass_check(state: CaptureState, cls: Value, value: Value) -> Any:
    if not isinstance(cls, ClassValue) or not isinstance(value, ClassValue):
        raise TypeError("type.__subclasscheck__ of something else than classes")
    return ConstantValue(type.__subclasscheck__(cls.real, value.real))


def is_instance(state: CaptureState, value: Value, classes: Value) -> bool:
    """``isinstance(value, classes)``."""
    cls = value.python_type()
    for wanted in _classes(state, classes, isinstance):
        if wanted is cls:
            return True
        own = _own_test(state, wanted, "__instancecheck__", value)
        if own is not None:
            found = own
        elif getattr(wanted, "_is_protocol", False):
            found = _follows_protocol(state, value, wanted)
        else:
            found = _is_plain_instance(state, value, wanted)
        if found:
            return True
    return False


def _is_plain_instance(state: CaptureState, value: Value, wanted: type) -> bool:
    """Python's own test: of the object's class, and of what it calls its class."""
    cls = value.python_type()
    if _is_subclass(state, cls, wanted):
        return True
    if not isinstance(value, InstanceValue) or not names_another_class(cls):
        return False
    shown = value.get_attribute(state, "__class__")
    return isinstance(shown, ClassValue) and _is_subclass(state, shown.real, wanted)


def _is_subclass(state: CaptureState, cls: type, wanted: type) -> bool:
    """The order of resolution tells, and what an ABC says; a class that it does not know may be registered later,
    unless both are a library's."""
    if not isinstance(wanted, abc.ABCMeta):
        return type.__subclasscheck__(wanted, cls)
    found = issubclass(cls, wanted)
    may_change = not (is_library_object(cls) and is_library_object(wanted))
    if not found and may_change:
        state.guards.add([], "not issubclass({c0}, {c1})", [cls, wanted], f"{cls} is no {wanted}")
    return found


# Names that ``typing`` has of classes, as ``typing.Iterable``, whose tests ask for the class that an object has.
_NAMED_CLASSES: Any = typing._SpecialGenericAlias  # type: ignore[attr-defined]
# The metaclass of the classes that were the types of tensors before there were dtypes.
_TYPED_TENSOR = type(torch.FloatTensor)


def _own_test(state: CaptureState, wanted: type, name: str, value: Value) -> bool | None:
    """What a metaclass of the program or of a library says; None where Python's own test, an ABC's, or a protocol's
    is in place."""
    if isinstance(wanted, _NAMED_CLASSES):
        if isinstance(value, ClassValue) and name == "__subclasscheck__":
            return _is_subclass(state, value.real, wanted.__origin__)
        return _is_subclass(state, value.python_type(), wanted.__origin__)
    meta = type(wanted)
    owner, entry = find_class_entry(state, meta, name)
    if owner in (None, type, abc.ABCMeta):
        return None
    assert owner is not None
    if owner.__module__ in ("typing", "typing_extensions") and issubclass(owner, abc.ABCMeta):
        return None
    widens = name == "__instancecheck__" and is_library_object(owner)
    if widens and issubclass(value.python_type(), wanted):
        return True  # a library's test never refuses what its class says
    if owner is _TYPED_TENSOR:
        if isinstance(value, TensorValue):
            return f"{wanted.__module__}.{wanted.__name__}" == type_name(value.fake)
        if not issubclass(value.python_type(), torch.Tensor):
            return False
    if not isinstance(entry, types.FunctionType):
        raise state.unsupported("isinstance", f"no rule for the test of {meta.__qualname__}")
    cls = state.wrap(wanted, None)
    return bind_class_entry(state, cls, meta, owner, name, entry).call(state, [value], {}).truth(state)


def _follows_protocol(state: CaptureState, value: Value, protocol: type) -> bool:
    """``isinstance`` with a runtime-checkable protocol: every member is there."""
    if not getattr(protocol, "_is_runtime_protocol", False):
        message = "Instance and class checks can only be used with @runtime_checkable protocols"
        raise state.raise_exception(TypeError, message)
    members = _protocol_members(protocol)
    return all(_has_member(state, value, protocol, name) for name in sorted(members))


def _has_member(state: CaptureState, value: Value, protocol: type, name: str) -> bool:
    """A method that is there as None counts as missing, as in a class that is not hashable."""
    if not value.has_attribute(state, name):
        return False
    return not (callable(getattr(protocol, name, None)) and is_none(value.get_attribute(state, name)))


def _protocol_members(protocol: type) -> set[str]:
    found = getattr(protocol, "__protocol_attrs__", None)
    if found is None:
        found = typing._get_protocol_attrs(protocol)  # type: ignore[attr-defined]  (3.11)
    return set(found)


def _classes(state: CaptureState, value: Value, caller: Callable[..., bool]) -> list[type]:
    if isinstance(value, SequenceValue) and issubclass(value.cls, tuple):
        return [cls for item in value.all(state) for cls in _classes(state, item, caller)]
    if isinstance(value, ClassValue) or isinstance(getattr(value, "real", None), _NAMED_CLASSES):
        return [value.real]  # type: ignore[attr-defined]
    if isinstance(value, ReferenceValue) and isinstance(value.real, types.UnionType):
        return [type(None) if cls is None else cls for cls in typing.get_args(value.real)]
    if isinstance(value, ConstantValue):
        ask_python(state, caller, int, value.value)  # raises, in Python's own words
    raise state.unsupported("isinstance", f"{caller.__name__} with {value.describe()}")
