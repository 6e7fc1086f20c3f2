"""``isinstance`` and ``issubclass``."""

from __future__ import annotations

import abc
import types
import typing

import torch

from compile_core.capture.object_model.class_entries import find_class_entry
from compile_core.capture.object_model.classes import ClassValue
from compile_core.capture.object_model.libraries import is_library_object
from compile_core.capture.object_model.objects import bind_class_entry
from compile_core.capture.values.base import CaptureState, Value
from compile_core.capture.values.call_rules import call_rule
from compile_core.capture.values.constants import ConstantValue
from compile_core.capture.values.containers import SequenceValue
from compile_core.capture.values.references import ReferenceValue
from compile_core.capture.values.tensors import TensorValue, type_name


@call_rule(isinstance)
def _isinstance(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    value, classes = args
    return ConstantValue(is_instance(state, value, classes))


@call_rule(issubclass)
def _issubclass(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    value, classes = args
    if not isinstance(value, ClassValue):
        raise state.raise_exception(TypeError, "issubclass() arg 1 must be a class")
    for wanted in _classes(state, classes, "issubclass"):
        own = _own_test(state, wanted, "__subclasscheck__", value)
        if _is_subclass(state, value.real, wanted) if own is None else own:
            return ConstantValue(True)
    return ConstantValue(False)


@call_rule(type.__instancecheck__)
def _plain_instance_check(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, value = args
    if not isinstance(cls, ClassValue):
        raise TypeError("type.__instancecheck__ of something else than a class")
    return ConstantValue(issubclass(value.python_type(), cls.real))


@call_rule(type.__subclasscheck__)
def _plain_subclass_check(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, value = args
    if not isinstance(cls, ClassValue) or not isinstance(value, ClassValue):
        raise TypeError("type.__subclasscheck__ of something else than classes")
    return ConstantValue(type.__subclasscheck__(cls.real, value.real))


def is_instance(state: CaptureState, value: Value, classes: Value) -> bool:
    """``isinstance(value, classes)``."""
    cls = value.python_type()
    for wanted in _classes(state, classes, "isinstance"):
        if wanted is cls:
            return True
        own = _own_test(state, wanted, "__instancecheck__", value)
        if own is not None:
            found = own
        elif wanted is torch.nn.Parameter or wanted is torch.nn.parameter.Buffer:
            found = issubclass(cls, wanted) and wanted is torch.nn.Parameter
        elif (
            isinstance(value, TensorValue)
            and wanted.__module__ in ("torch", "torch.cuda")
            and not (issubclass(torch.Tensor, wanted) or wanted in (torch.Size, torch.device, torch.dtype))
        ):
            # The classes that were the types of tensors before there were dtypes.
            found = f"{wanted.__module__}.{wanted.__name__}" == type_name(value.fake)
        elif getattr(wanted, "_is_protocol", False):
            found = _follows_protocol(state, value, wanted)
        else:
            found = _is_subclass(state, cls, wanted)
        if found:
            return True
    return False


def _is_subclass(state: CaptureState, cls: type, wanted: type) -> bool:
    """``issubclass``; a class that an ABC does not know may be registered later, unless both are a library's."""
    found = issubclass(cls, wanted)
    may_change = not (is_library_object(cls) and is_library_object(wanted))
    if not found and may_change and isinstance(wanted, abc.ABCMeta):
        state.guards.add([], "not issubclass({c0}, {c1})", [cls, wanted], f"{cls} is no {wanted}")
    return found


def _own_test(state: CaptureState, wanted: type, name: str, value: Value) -> bool | None:
    """What a metaclass of the program says; None where Python's own test (or an ABC's) is in place."""
    owner, entry = find_class_entry(state, type(wanted), name)
    if owner in (None, type, abc.ABCMeta) or is_library_object(owner):
        return None
    assert owner is not None
    cls = state.wrap(wanted, None)
    return (
        bind_class_entry(state, cls, type(wanted), owner, name, entry).call(state, [value], {}).truth(state)
    )


def _follows_protocol(state: CaptureState, value: Value, protocol: type) -> bool:
    """``isinstance`` with a runtime-checkable protocol: every member is there."""
    if not getattr(protocol, "_is_runtime_protocol", False):
        message = "Instance and class checks can only be used with @runtime_checkable protocols"
        raise state.raise_exception(TypeError, message)
    members = _protocol_members(protocol)
    return all(value.has_attribute(state, name) for name in sorted(members))


def _protocol_members(protocol: type) -> set[str]:
    found = getattr(protocol, "__protocol_attrs__", None)
    if found is None:
        found = typing._get_protocol_attrs(protocol)  # type: ignore[attr-defined]  (3.11)
    return set(found)


def _classes(state: CaptureState, value: Value, caller: str) -> list[type]:
    if isinstance(value, SequenceValue) and issubclass(value.cls, tuple):
        return [cls for item in value.all(state) for cls in _classes(state, item, caller)]
    if isinstance(value, ClassValue):
        return [value.real]
    if isinstance(value, ReferenceValue) and isinstance(value.real, types.UnionType):
        return [type(None) if cls is None else cls for cls in typing.get_args(value.real)]
    if isinstance(value, ConstantValue):
        kind = "a type, a tuple of types, or a union"
        if caller == "issubclass":
            kind = "a class, a tuple of classes, or a union"
        raise state.raise_exception(TypeError, f"{caller}() arg 2 must be {kind}")
    raise state.unsupported("isinstance", f"{caller} with {value.describe()}")
