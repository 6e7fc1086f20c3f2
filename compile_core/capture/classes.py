"""Classes: their attributes, the objects that they make, and ``super()``."""

from __future__ import annotations

import types
from typing import Any

import torch

from compile_core.capture.base import CaptureState, Value
from compile_core.capture.containers import SequenceValue
from compile_core.capture.content import content_base, make_content
from compile_core.capture.exceptions import make_exception
from compile_core.capture.functions import BoundMethodValue
from compile_core.capture.modules import ModuleValue
from compile_core.capture.objects import (
    InstanceValue,
    bind_class_entry,
    find_class_entry,
    guard_entry,
    is_plain_layout,
    wrap_class_entry,
)
from compile_core.capture.references import ReferenceValue, find_call_rule

# Where torch takes a dtype it takes these classes of Python too.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class ClassValue(ReferenceValue):
    """A class."""

    def graph_argument(self, state: CaptureState) -> Any:
        dtype = _DTYPES.get(self.real)
        return super().graph_argument(state) if dtype is None else dtype

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return state.from_constant(getattr(self.real, name))
        owner, entry = find_class_entry(state, self.real, name)
        if owner is None:
            if hasattr(self.real, name):
                raise state.unsupported(
                    "class-attribute", f"{name!r} of the metaclass of {self.real.__qualname__}"
                )
            raise state.raise_exception(
                AttributeError, f"type object {self.real.__name__!r} has no attribute {name!r}"
            )
        return read_class_entry(state, self, owner, name, entry)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        cls = self.real
        rule = find_call_rule(cls)
        if rule is not None:
            try:
                return rule(state, args, kwargs)
            except TypeError as error:
                raise state.unsupported("call-form", f"{cls.__name__}: {error}") from error
        if issubclass(cls, BaseException):
            return make_exception(state, cls, args, kwargs)
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return self._make_named_tuple(state, args, kwargs)
        if type(cls).__call__ is not type.__call__:
            raise state.unsupported("class-call", f"no rule to make an object of {cls.__qualname__}")
        made = self._new(state, args, kwargs)
        if isinstance(made, InstanceValue) and issubclass(made.cls, cls):
            owner, init = find_class_entry(state, made.cls, "__init__")
            if owner is not None and owner is not object:
                bind_class_entry(state, made, made.cls, owner, "__init__", init).call(state, args, kwargs)
        return made

    def _new(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What ``__new__`` makes."""
        cls = self.real
        owner, entry = find_class_entry(state, cls, "__new__")
        if isinstance(entry, staticmethod):
            return self.get_attribute(state, "__new__").call(state, [self, *args], kwargs)
        if owner is object and (args or kwargs) and cls.__init__ is object.__init__:
            raise state.raise_exception(TypeError, f"{cls.__name__}() takes no arguments")
        return new_instance(state, cls, args, kwargs)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        """``list[int]`` and its like."""
        parts = key.all(state) if isinstance(key, SequenceValue) else [key]
        if self.real.__module__ != "builtins" or not all(isinstance(part, ClassValue) for part in parts):
            return super().get_item(state, key)
        named = tuple(part.real for part in parts if isinstance(part, ClassValue))
        return ReferenceValue(types.GenericAlias(self.real, named))

    def _make_named_tuple(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        cls = self.real
        if find_class_entry(state, cls, "__new__")[0] is not next(
            (entry for entry in cls.__mro__ if "_fields" in entry.__dict__), None
        ):
            raise state.unsupported("class-call", f"{cls.__qualname__} has its own __new__")
        fields = list(cls._fields)
        items = dict(zip(fields, args, strict=False)) | kwargs
        for name, default in cls._field_defaults.items():
            if name not in items:
                items[name] = state.from_constant(default)
        if len(args) > len(fields) or set(items) != set(fields):
            raise state.raise_exception(TypeError, f"{cls.__name__}: arguments do not match the fields")
        return SequenceValue([items[name] for name in fields], cls)


def new_instance(state: CaptureState, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What ``__new__`` of the built-in base makes: an object without attributes."""
    base = content_base(cls)
    if base is None and not is_plain_layout(cls):
        raise state.unsupported("class-call", f"no rule to make an object of {cls.__qualname__}")
    if getattr(cls, "__abstractmethods__", None):
        raise state.raise_exception(TypeError, f"Can't instantiate abstract class {cls.__name__}")
    if issubclass(cls, torch.nn.Module) and base is None:
        return ModuleValue(cls, None, None)
    content = None if base is None else make_content(state, base, args, kwargs)
    return InstanceValue(cls, None, None, content)


def read_class_entry(state: CaptureState, cls: ClassValue, owner: type, name: str, entry: Any) -> Value:
    """What an entry of a class gives when it is read from the class itself."""
    if isinstance(entry, (staticmethod, classmethod)):
        guard_entry(state, owner, name, entry)
        function = state.wrap_trusted_function(entry.__func__)
        return function if isinstance(entry, staticmethod) else BoundMethodValue(function, cls)
    if isinstance(entry, types.ClassMethodDescriptorType):
        return BoundMethodValue(state.wrap(entry, None), cls)
    return wrap_class_entry(state, cls.real, owner, name, entry)


class SuperValue(Value):
    """``super()``: attributes behind a class in the resolution order of the object's class."""

    def __init__(self, after: type, owner: Value) -> None:
        self.after = after
        self.owner = owner

    def python_type(self) -> type:
        return super

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        cls = self.owner.real if isinstance(self.owner, ClassValue) else self.owner.python_type()
        defining, entry = find_class_entry(state, cls, name, self.after)
        if defining is None:
            raise state.raise_exception(AttributeError, f"'super' object has no attribute {name!r}")
        if isinstance(self.owner, ClassValue):
            return read_class_entry(state, self.owner, defining, name, entry)
        return bind_class_entry(state, self.owner, cls, defining, name, entry)
