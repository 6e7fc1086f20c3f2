"""Instances of classes: attribute look-up as ``object.__getattribute__`` does it, and stores."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeGuard

from gradsplit.compile_core.capture.code_objects.python_versions import NO_DICTIONARY
from gradsplit.compile_core.capture.object_model.class_entries import (
    changed_class_attribute,
    class_lookup,
    find_class_entry,
    guard_entry,
    wrap_class_entry,
)
from gradsplit.compile_core.capture.object_model.content import overrides
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue, FunctionValue
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING, AttributeOwner
from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ContainerValue
from gradsplit.compile_core.capture.values.hash_keys import ComputedKey
from gradsplit.compile_core.capture.values.iterators import Indexed, RealIterator
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.ir.sources import AttributeSource, ItemSource, OwnDictSource, Source

# Caches of the standard library, of weak references, which their owners do without where they are ``None``.
_CACHES = frozenset({(functools.singledispatchmethod, "_method_cache")})


def _acts_as(entry: Any, kind: type, method: str = "__get__") -> TypeGuard[Any]:
    """Whether a descriptor is of a built-in kind, whose method its class has not replaced."""
    return isinstance(entry, kind) and getattr(type(entry), method) is getattr(kind, method)


# Methods that are written in C.
OWN_OF_PYTHON = (types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType)


def bind_class_entry(
    state: CaptureState, owner_value: Value, cls: type, owner: type, name: str, entry: Any
) -> Value:
    """What an entry of the class gives when it is read from an instance (or through ``super()``)."""
    if isinstance(entry, (property, staticmethod, classmethod)):
        guard_entry(state, owner, name, entry)
    binds = isinstance(entry, (types.FunctionType, functools._lru_cache_wrapper))
    if binds or state.original_of(entry) is not entry:
        return BoundMethodValue(wrap_class_entry(state, cls, owner, name, entry), owner_value)
    if _acts_as(entry, property):
        if entry.fget is None:
            raise state.raise_exception(AttributeError, f"property {name!r} has no getter")
        return state.wrap_trusted_function(entry.fget).call(state, [owner_value], {})
    if _acts_as(entry, staticmethod):
        return state.wrap_trusted_function(entry.__func__)
    if _acts_as(entry, classmethod):
        function = state.wrap_trusted_function(entry.__func__)
        return BoundMethodValue(function, state.wrap(cls, None))
    if isinstance(entry, types.BuiltinFunctionType):
        return state.wrap(entry, None)
    if isinstance(entry, OWN_OF_PYTHON):
        return BoundMethodValue(state.wrap(entry, None), owner_value)
    if _acts_as(entry, functools.cached_property):
        return _compute_once(state, owner_value, owner, name, entry)
    if isinstance(entry, types.GetSetDescriptorType) and isinstance(owner_value, InstanceValue):
        return owner_value.read_in_c(state, name)
    if hasattr(type(entry), "__get__"):
        args = [owner_value, state.wrap(cls, None)]
        found = call_descriptor(state, owner, name, entry, "__get__", args)
        if found is not None:
            return found
        raise state.unsupported(
            "descriptor", f"the descriptor {type(entry).__name__} of {cls.__qualname__}.{name}"
        )
    return wrap_class_entry(state, cls, owner, name, entry)


def call_class_entry(
    state: CaptureState,
    value: Value,
    cls: type,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value] | None = None,
    but: tuple[type, ...] = (),
) -> Value | None:
    """What a special method gives; None where there is none but that of ``object``, or one of these kinds."""
    owner, entry = find_class_entry(state, cls, name)
    if owner is None or owner is object or isinstance(entry, but):
        return None
    return bind_class_entry(state, value, cls, owner, name, entry).call(state, args, kwargs or {})


def call_descriptor(
    state: CaptureState, owner: type, name: str, entry: Any, method: str, args: list[Value]
) -> Value | None:
    """Call ``__get__``, ``__set__`` or ``__delete__`` of a descriptor; None where Python does not define it."""
    if isinstance(entry, staticmethod | classmethod | property):
        return None
    if not isinstance(find_class_entry(state, type(entry), method)[1], types.FunctionType):
        return None
    names = AttributeSource(state.reference_source(owner.__qualname__, owner), "__dict__")
    descriptor = state.wrap(entry, ItemSource(names, name))
    return call_class_entry(state, descriptor, type(entry), method, args)


def _compute_once(
    state: CaptureState, instance: Value, owner: type, name: str, entry: functools.cached_property[Any]
) -> Value:
    """``functools.cached_property`` where the object has no value yet."""
    guard_entry(state, owner, name, entry)
    if not isinstance(instance, InstanceValue):
        raise state.unsupported("descriptor", f"a cached property of {instance.describe()}")
    made = state.wrap_trusted_function(entry.func).call(state, [instance], {})
    instance.change(state, entry.attrname or name, made)
    return made


def _bind_changed(instance: Value, value: Value) -> Value:
    return BoundMethodValue(value, instance) if isinstance(value, FunctionValue) else value


def is_plain_layout(cls: type) -> bool:
    """Whether attributes are all that an object consists of: its layout is that of ``object`` or of slots."""
    plain = (object, types.SimpleNamespace)
    return all(entry in plain or is_defined_in_python(entry) for entry in cls.__mro__)


def is_defined_in_python(cls: type) -> bool:
    """Whether a class statement made a class: one that C code made has methods in C, and state that they see."""
    if not cls.__flags__ & (1 << 9):
        return False
    own = (types.MethodDescriptorType, types.WrapperDescriptorType)
    return not any(isinstance(entry, own) and entry.__objclass__ is cls for entry in cls.__dict__.values())


def names_another_class(cls: type) -> bool:
    """Whether ``__class__`` of the objects is what the program says, as proxies do."""
    return class_lookup(cls, "__class__")[0] is not object


class InstanceValue(AttributeOwner):
    """An object of a plain class, or of a subclass of a built-in type, which then has a content."""

    def __init__(self, cls: type, real: Any, source: Source | None, content: Value | None = None) -> None:
        self.cls = cls
        self.content = content
        if isinstance(content, ContainerValue):
            content.owner = self
        self.real = real
        self.source = source
        self.changes: dict[str, Value] = {}
        self.deleted: set[str] = set()

    def truth(self, state: CaptureState) -> bool:
        result = self._special(state, "__bool__", []) or self._special(state, "__len__", [])
        return result is None or result.truth(state)

    def hash_key(self, state: CaptureState) -> Any:
        if self.cls.__hash__ is object.__hash__ and self.cls.__eq__ is object.__eq__:
            return self.real if self.real is not None else self
        if self.content is not None and not overrides(
            self.cls, self.content.python_type(), "__hash__", "__eq__"
        ):
            return self.content.hash_key(state)
        if find_class_entry(state, self.cls, "__hash__")[1] is None:
            raise state.raise_exception(TypeError, f"unhashable type: {self.cls.__name__!r}")
        hashed = call_class_entry(state, self, self.cls, "__hash__", [], but=OWN_OF_PYTHON)
        return super().hash_key(state) if hashed is None else ComputedKey(state, self, hashed.as_constant())

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if type(self.cls.__getattribute__) is types.FunctionType:
            found = self._call_getattribute(state, name)
        else:
            found = self.plain_attribute(state, name)
        return self.missing_attribute(state, name) if found is None else found

    def _call_getattribute(self, state: CaptureState, name: str) -> Value | None:
        """The user's own ``__getattribute__``; None where it raises AttributeError and ``__getattr__`` follows."""
        try:
            return self._special(state, "__getattribute__", [ConstantValue(name)])
        except SymbolicRaise as raised:
            follows = find_class_entry(state, self.cls, "__getattr__")[0] is not None
            if follows and issubclass(raised.value.python_type(), AttributeError):
                return None
            raise

    def plain_attribute(self, state: CaptureState, name: str) -> Value | None:
        """What ``object.__getattribute__`` finds, None where it raises AttributeError."""
        cls = self.cls
        if name == "__class__" and not names_another_class(cls):
            return state.wrap(cls, None)
        if name == "__dict__":
            return self.instance_dict(state)
        owner, entry = find_class_entry(state, cls, name)
        changed = changed_class_attribute(state, cls, name)
        if changed is not None:
            found = self.own_attribute(state, name)
            return found if found is not None else _bind_changed(self, changed)
        if owner is not None and isinstance(entry, types.MemberDescriptorType):
            return self._slot(state, name)
        if owner is not None and _is_data_descriptor(entry):
            return bind_class_entry(state, self, cls, owner, name, entry)
        found = self.own_attribute(state, name)
        if found is not None:
            return found
        self.guard_absent(state, name)
        return None if owner is None else bind_class_entry(state, self, cls, owner, name, entry)

    def read_in_c(self, state: CaptureState, name: str) -> Value:
        """An attribute that a class in C has for each object."""
        raise state.unsupported("descriptor", f"{name!r} of {self.describe()}, which is written in C")

    def dict_source(self) -> Source | None:
        if self.source is None or self.real is None or not self.cls.__dictoffset__:
            return None
        if type(self.cls.__getattribute__) is types.FunctionType:
            return OwnDictSource(self.source)
        return AttributeSource(self.source, "__dict__")

    def real_dict(self) -> dict[str, Any]:
        if self.real is None or not self.cls.__dictoffset__:
            return {}
        return object.__getattribute__(self.real, "__dict__")

    def own_attribute(self, state: CaptureState, name: str) -> Value | None:
        return ConstantValue(None) if (self.cls, name) in _CACHES else super().own_attribute(state, name)

    def _slot(self, state: CaptureState, name: str) -> Value:
        if name in self.changes and self.changes[name] is not MISSING:
            return self.changes[name]
        if self.real is not None and name not in self.changes:
            try:
                found = getattr(self.real, name)
            except AttributeError:
                found = MISSING
            if found is not MISSING:
                return state.wrap(found, None if self.source is None else AttributeSource(self.source, name))
            raise state.unsupported("empty-slot", f"the empty slot {name!r} of {self.describe()}")
        raise state.no_attribute(self.cls, name)

    def instance_dict(self, state: CaptureState) -> Value:
        if not self.cls.__dictoffset__:
            raise state.no_attribute(self.cls, "__dict__")
        return super().instance_dict(state)

    def missing_attribute(self, state: CaptureState, name: str) -> Value:
        """``__getattr__``, or AttributeError."""
        found = self._special(state, "__getattr__", [ConstantValue(name)])
        if found is None:
            raise state.no_attribute(self.cls, name)
        return found

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if self._has_own(state, "__setattr__"):
            self._special(state, "__setattr__", [ConstantValue(name), value])
        else:
            self.store(state, name, value)

    def _has_own(self, state: CaptureState, name: str) -> bool:
        """Whether a class of the program has this method, which may be one in C: ``__setattr__ = dict.__setitem__``."""
        owner, entry = find_class_entry(state, self.cls, name)
        return owner is not None and (isinstance(entry, types.FunctionType) or is_defined_in_python(owner))

    def store(self, state: CaptureState, name: str, value: Value) -> None:
        """What ``object.__setattr__`` does."""
        if name in ("__dict__", "__class__"):
            raise state.unsupported("attribute-store", f"a store to {name}")
        if self._by_descriptor(state, name, "__set__", "fset", [value]):
            return
        owner, entry = find_class_entry(state, self.cls, name)
        if owner is not None and not self.cls.__dictoffset__ and not _is_data_descriptor(entry):
            raise state.raise_exception(
                AttributeError, f"{self.cls.__name__!r} object attribute {name!r} is read-only"
            )
        if owner is None and not self.cls.__dictoffset__:
            raise self._not_found(state, name)
        self.change(state, name, value)

    def _not_found(self, state: CaptureState, name: str) -> SymbolicRaise:
        """What a store to an attribute raises that the object cannot have, and the deletion of one that it has not."""
        message = f"{self.cls.__name__!r} object has no attribute {name!r}"
        return state.raise_exception(
            AttributeError, message if self.cls.__dictoffset__ else message + NO_DICTIONARY
        )

    def _by_descriptor(
        self, state: CaptureState, name: str, method: str, accessor: str, args: list[Value]
    ) -> bool:
        """Whether a descriptor of the class stores or deletes the attribute, which it then has done."""
        owner, entry = find_class_entry(state, self.cls, name)
        if owner is None or not _is_data_descriptor(entry) or isinstance(entry, types.MemberDescriptorType):
            return False
        if _acts_as(entry, property, method):
            function = getattr(entry, accessor)
            if function is None:
                kind = "setter" if accessor == "fset" else "deleter"
                message = f"property {name!r} of {self.cls.__qualname__!r} object has no {kind}"
                raise state.raise_exception(AttributeError, message)
            state.wrap_trusted_function(function).call(state, [self, *args], {})
        elif call_descriptor(state, owner, name, entry, method, [self, *args]) is None:
            raise state.unsupported("descriptor", f"{method} of {self.cls.__qualname__}.{name}")
        return True

    def before_change_of_content(self, state: CaptureState) -> None:
        """A dictionary that is its own ``__dict__`` has two ways to each item, of which a capture follows one."""
        place = self.dict_source()
        if self.source is None or place is None or not isinstance(self.content, DictValue):
            return
        if self.real_dict() is self.real:
            raise state.unsupported("own-dict", f"a change of {self.describe()}, which is its own __dict__")
        state.guards.distinct(self.source, place)

    def delete_attribute(self, state: CaptureState, name: str) -> None:
        if self._has_own(state, "__delattr__"):
            self._special(state, "__delattr__", [ConstantValue(name)])
        else:
            self.remove(state, name)

    def remove(self, state: CaptureState, name: str) -> None:
        """What ``object.__delattr__`` does."""
        if self._by_descriptor(state, name, "__delete__", "fdel", []):
            return
        entry = find_class_entry(state, self.cls, name)[1]
        if isinstance(entry, types.MemberDescriptorType):
            self._slot(state, name)
        elif self.own_attribute(state, name) is None:
            self.guard_absent(state, name)
            raise self._not_found(state, name)
        self.forget(state, name)

    def _special(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value | None:
        """What a special method gives; None where there is none."""
        if find_class_entry(state, self.cls, name)[1] is None:
            raise state.raise_exception(TypeError, _refusal(self.cls.__name__, name))
        return call_class_entry(state, self, self.cls, name, args, kwargs)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        found = self._special(state, "__call__", args, kwargs)
        if found is None:
            raise state.raise_exception(TypeError, f"{self.cls.__name__!r} object is not callable")
        return found

    def graph_argument(self, state: CaptureState) -> Any:
        return super().graph_argument(state) if self.content is None else self.content.graph_argument(state)

    def iterate(self, state: CaptureState) -> Value:
        result = self._special(state, "__iter__", [])
        if result is not None:
            return result
        if find_class_entry(state, self.cls, "__getitem__")[0] is not None:
            return RealIterator(iter(Indexed(state, self)))
        raise state.raise_exception(TypeError, f"{self.cls.__name__!r} object is not iterable")

    def advance(self, state: CaptureState) -> Value | None:
        try:
            return self._special(state, "__next__", []) or super().advance(state)
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), StopIteration):
                raise
            self.stopped = raised
            return None

    def length(self, state: CaptureState) -> int:
        result = self._special(state, "__len__", [])
        if result is None:
            raise state.raise_exception(TypeError, f"object of type {self.cls.__name__!r} has no len()")
        return int(result.as_constant())

    def get_item(self, state: CaptureState, key: Value) -> Value:
        result = self._special(state, "__getitem__", [key])
        if result is None:
            raise state.raise_exception(TypeError, f"{self.cls.__name__!r} object is not subscriptable")
        return result

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        if self._special(state, "__setitem__", [key, value]) is None:
            super().set_item(state, key, value)

    def delete_item(self, state: CaptureState, key: Value) -> None:
        if self._special(state, "__delitem__", [key]) is None:
            super().delete_item(state, key)

    def contains(self, state: CaptureState, item: Value) -> bool:
        result = self._special(state, "__contains__", [item])
        if result is not None:
            return result.truth(state)
        iterator = self.iterate(state)
        while (member := iterator.advance(state)) is not None:
            if member is item or state.equal(member, item):
                return True
        return False


def _refusal(cls: str, name: str) -> str:
    """What Python says of a class that sets a special method to None."""
    shown = {"__iter__": "iterable", "__contains__": "a container"}.get(name)
    return f"{cls!r} object is not {shown}" if shown else "'NoneType' object is not callable"


def _is_data_descriptor(entry: Any) -> bool:
    return hasattr(type(entry), "__set__") or hasattr(type(entry), "__delete__")
