"""Classes: their attributes, the objects that they make, and ``super()``."""

from __future__ import annotations

import types
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import (
    changed_class_attribute,
    find_class_entry,
    guard_entry,
    wrap_class_entry,
)
from gradsplit.compile_core.capture.object_model.content import content_base, make_content
from gradsplit.compile_core.capture.object_model.enums import is_enumeration
from gradsplit.compile_core.capture.object_model.exceptions import make_exception
from gradsplit.compile_core.capture.object_model.existing_objects import CallableReferenceValue
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.object_model.objects import (
    OWN_OF_PYTHON,
    InstanceValue,
    bind_class_entry,
    call_class_entry,
    call_descriptor,
    is_plain_layout,
)
from gradsplit.compile_core.capture.object_model.type_forms import subscript
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import find_call_rule, fold_rule
from gradsplit.compile_core.capture.values.constants import (
    LITERAL_TYPES,
    ConstantValue,
    fold,
    is_folded,
)
from gradsplit.compile_core.capture.values.containers import SequenceValue, sequence_fields
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import AttributeSource
from gradsplit.compile_core.ir.wrapper_edges import call_of_class
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper_class

# Of objects that run code when they are dropped; nothing in a capture tells when that is.
FINALIZER = "finalizer"
# Where torch takes a dtype it takes these classes of Python too.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class ClassValue(ReferenceValue):
    """A class."""

    def graph_argument(self, state: CaptureState) -> Any:
        if is_wrapper_class(self.real):
            return state.graph.hold("class", self.real)
        dtype = _DTYPES.get(self.real)
        return super().graph_argument(state) if dtype is None else dtype

    def as_constant(self) -> Any:
        return self.real

    def truth(self, state: CaptureState) -> bool:
        for name in ("__bool__", "__len__"):
            result = self.call_metaclass(state, name, [])
            if result is not None:
                return result.truth(state)
        return True

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        cls = self.real
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return state.from_constant(getattr(cls, name))
        if name in ("__mro__", "__bases__"):
            return SequenceValue([state.wrap(entry, None) for entry in getattr(cls, name)], tuple)
        if name == "__class__":
            return state.wrap(type(cls), None)
        if name == "__dict__":
            # Of which only the names can be asked for.
            place = state.reference_source(cls.__qualname__, cls)
            return state.wrap(cls.__dict__, AttributeSource(place, "__dict__"))
        if is_enumeration(cls) and name in cls._member_map_:
            return ConstantValue(cls._member_map_[name])
        changed = changed_class_attribute(state, cls, name)
        if changed is not None:
            return changed
        meta = type(cls)
        meta_owner, meta_entry = find_class_entry(state, meta, name)
        if meta_owner not in (None, type, object) and hasattr(type(meta_entry), "__set__"):
            assert meta_owner is not None
            return bind_class_entry(state, self, meta, meta_owner, name, meta_entry)
        owner, entry = find_class_entry(state, cls, name)
        if owner is None and is_enumeration(cls):
            return fold(state, lambda: getattr(cls, name), [], {})
        if owner is not None:
            return read_class_entry(state, self, owner, name, entry)
        if meta_owner is not None:
            return bind_class_entry(state, self, meta, meta_owner, name, meta_entry)
        found = self.call_metaclass(state, "__getattr__", [ConstantValue(name)])
        if found is not None:
            return found
        message = f"type object {cls.__name__!r} has no attribute {name!r}"
        raise state.raise_exception(AttributeError, message)

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        self._check_store(state, name)
        state.effects.class_changed(self.real, name, value)

    def delete_attribute(self, state: CaptureState, name: str) -> None:
        self._check_store(state, name)
        stored = state.effects.classes.get((self.real, name))
        if stored is MISSING or (stored is None and name not in self.real.__dict__):
            message = f"type object {self.real.__name__!r} has no attribute {name!r}"
            raise state.raise_exception(AttributeError, message)
        if name not in self.real.__dict__:
            del state.effects.classes[(self.real, name)]
        else:
            state.effects.class_changed(self.real, name, MISSING)

    def _check_store(self, state: CaptureState, name: str) -> None:
        cls = self.real
        own = cls.__dict__.get(name)
        special = (
            name.startswith("__")
            or cls in state.made_classes
            or hasattr(type(own), "__get__")
            or hasattr(type(cls), name)
        )
        if special or is_library_object(cls) or type(cls).__setattr__ is not type.__setattr__:
            raise state.unsupported("class-attribute-store", f"a store to {cls.__qualname__}.{name}")
        if not cls.__flags__ & (1 << 9):
            message = f"cannot set {name!r} attribute of immutable type {cls.__name__!r}"
            raise state.raise_exception(TypeError, message)

    def call_metaclass(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value | None:
        """What a special method of the metaclass gives; None where the metaclass has Python's own."""
        meta = type(self.real)
        entry = find_class_entry(state, meta, name)[1]
        if is_enumeration(self.real) and isinstance(entry, types.FunctionType):
            return fold(state, entry, [self, *args], kwargs or {})
        return call_class_entry(state, self, meta, name, args, kwargs, OWN_OF_PYTHON)

    def iterate(self, state: CaptureState) -> Value:
        if is_enumeration(self.real):
            return fold(state, tuple, [self], {}).iterate(state)
        return self.call_metaclass(state, "__iter__", []) or super().iterate(state)

    def length(self, state: CaptureState) -> int:
        result = self.call_metaclass(state, "__len__", [])
        return super().length(state) if result is None else int(result.as_constant())

    def contains(self, state: CaptureState, item: Value) -> bool:
        result = self.call_metaclass(state, "__contains__", [item])
        return super().contains(state, item) if result is None else result.truth(state)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        found = self.call_metaclass(state, "__getitem__", [key])
        return subscript(state, self.real, key) if found is None else found

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        cls = self.real
        rule = find_call_rule(cls)
        if rule is not None:
            try:
                return rule(state, args, kwargs)
            except TypeError as error:
                raise state.unsupported("call-form", f"{cls.__name__}: {error}") from error
        found = self.call_metaclass(state, "__call__", args, kwargs)
        return self.instantiate(state, args, kwargs) if found is None else found

    def instantiate(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What ``type.__call__`` does."""
        cls = self.real
        if issubclass(cls, BaseException):
            return make_exception(state, cls, args, kwargs)
        if sequence_fields(cls) and not hasattr(cls, "_fields"):
            return SequenceValue(list(state.items_of(args[0])), cls)
        if is_folded(cls):
            return fold(state, cls, args, kwargs)
        if is_wrapper_class(cls):
            return state.call_tensor_op(
                "call_function", call_of_class, [self, ConstantValue("__call__"), *args], kwargs
            )
        made = self._new(state, args, kwargs)
        if isinstance(made, InstanceValue) and issubclass(made.cls, cls):
            call_class_entry(state, made, made.cls, "__init__", args, kwargs)
        return made

    def _new(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What ``__new__`` makes."""
        cls = self.real
        owner, entry = find_class_entry(state, cls, "__new__")
        if isinstance(entry, staticmethod) or issubclass(cls, torch.Tensor):
            return self.get_attribute(state, "__new__").call(state, [self, *args], kwargs)
        if owner is object and (args or kwargs) and cls.__init__ is object.__init__:
            raise state.raise_exception(TypeError, f"{cls.__name__}() takes no arguments")
        return new_instance(state, cls, args, kwargs)


def new_instance(state: CaptureState, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What ``__new__`` of the built-in base makes: an object without attributes."""
    base = content_base(cls)
    if base is None and not is_plain_layout(cls):
        raise state.unsupported("class-call", f"no rule to make an object of {cls.__qualname__}")
    if hasattr(cls, "__del__"):
        raise state.unsupported(FINALIZER, f"an object of {cls.__qualname__} runs __del__ when it is dropped")
    if getattr(cls, "__abstractmethods__", None):
        fold(state, lambda: object.__new__(cls), [], {})  # raises, in Python's own words
    if issubclass(cls, torch.nn.Module) and base is None:
        return ModuleValue(cls, None, None)
    content = None if base is None else make_content(state, base, args, kwargs)
    return InstanceValue(cls, None, None, content)


def read_class_entry(state: CaptureState, cls: ClassValue, owner: type, name: str, entry: Any) -> Value:
    """What an entry of a class gives when it is read from the class itself."""
    if isinstance(entry, (staticmethod, classmethod)):
        if is_wrapper_class(cls.real) and is_library_object(owner):
            return CallableReferenceValue(
                getattr(cls.real, name),
                lambda state, args, kwargs: state.call_tensor_op(
                    "call_function", call_of_class, [cls, ConstantValue(name), *args], kwargs
                ),
            )
        guard_entry(state, owner, name, entry)
        function = state.wrap_trusted_function(entry.__func__)
        return function if isinstance(entry, staticmethod) else BoundMethodValue(function, cls)
    if isinstance(entry, types.ClassMethodDescriptorType):
        if find_call_rule(entry) is not None:
            return BoundMethodValue(CallableReferenceValue(entry, find_call_rule(entry)), cls)
        found = getattr(cls.real, name)
        # Class methods of immutable built-in types are pure, such as ``int.from_bytes``.
        is_pure = cls.real in LITERAL_TYPES or is_folded(cls.real)
        return CallableReferenceValue(found, find_call_rule(found) or (fold_rule(found) if is_pure else None))
    if not isinstance(entry, (types.FunctionType, property)) and hasattr(type(entry), "__get__"):
        if is_library_object(owner) and is_library_object(type(entry)):
            return state.wrap(getattr(cls.real, name), None)
        args = [ConstantValue(None), cls]
        found = call_descriptor(state, owner, name, entry, "__get__", args)
        if found is not None:
            return found
    return wrap_class_entry(state, cls.real, owner, name, entry)


class SuperValue(Value):
    """``super()``: attributes after a class in the resolution order of the object's class."""

    cls = super

    def __init__(self, after: type, owner: Value) -> None:
        self.after = after
        self.owner = owner

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        owner = self.owner
        if isinstance(owner, ClassValue) and issubclass(self.after, type):
            meta = type(owner.real)  # in a method of a metaclass
            defining, entry = find_class_entry(state, meta, name, self.after)
            if defining is not None:
                return bind_class_entry(state, owner, meta, defining, name, entry)
        cls = owner.real if isinstance(owner, ClassValue) else owner.python_type()
        defining, entry = find_class_entry(state, cls, name, self.after)
        if defining is None:
            raise state.raise_exception(AttributeError, f"'super' object has no attribute {name!r}")
        if isinstance(owner, ClassValue):
            return read_class_entry(state, owner, defining, name, entry)
        return bind_class_entry(state, owner, cls, defining, name, entry)
