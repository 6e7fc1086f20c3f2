"""Enumerations: their members are literals, and what a class of them is asked is asked of the class itself."""

from __future__ import annotations

import enum
import types

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.objects import bind_class_entry
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import BuiltinMethod
from gradsplit.compile_core.ir.sources import AttributeSource, ItemSource


def enum_attribute(state: CaptureState, member: Value, name: str) -> Value:
    """An attribute of a member: of its own, or of its class, bound to it."""
    real = member.as_constant()
    cls = type(real)
    if name == "__class__":
        return state.wrap(cls, None)
    place = AttributeSource(state.reference_source(repr(real), real), "__dict__")
    if name in ("value", "_value_") and find_class_entry(state, cls, "value")[0] is enum.Enum:
        return state.wrap(real._value_, ItemSource(place, "_value_"))
    if name in real.__dict__ and not name.startswith("__"):
        return state.wrap(real.__dict__[name], ItemSource(place, name))
    owner, entry = find_class_entry(state, cls, name)
    if owner is None:
        raise state.no_attribute(cls, name)
    if isinstance(entry, enum.property) and not is_library_object(owner) and entry.fget is not None:
        return state.wrap_trusted_function(entry.fget).call(state, [member], {})
    if is_library_object(owner) or isinstance(
        entry, (types.WrapperDescriptorType, types.MethodDescriptorType)
    ):
        found = getattr(real, name)
        return BuiltinMethod(member, name) if callable(found) else state.from_constant(found)
    return bind_class_entry(state, member, cls, owner, name, entry)


def is_enumeration(cls: type) -> bool:
    """Whether a class has members and a metaclass that is the standard library's."""
    return isinstance(cls, enum.EnumMeta) and is_library_object(type(cls))
