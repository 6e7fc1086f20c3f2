"""What a class holds under a name: found along the resolution order, and guarded on behalf of the captured program."""

from __future__ import annotations

import types
from typing import Any

from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.ir.sources import AttributeSource, ItemSource, Source


def class_lookup(cls: type, name: str, after: type | None = None) -> tuple[type | None, Any]:
    """The class in the resolution order that defines a name, and the raw entry; (None, MISSING) without
    one."""
    order = cls.__mro__
    if after is not None:
        order = order[order.index(after) + 1 :]
    for entry in order:
        if name in entry.__dict__:
            return entry, entry.__dict__[name]
    return None, MISSING


def find_class_entry(
    state: CaptureState, cls: type, name: str, after: type | None = None
) -> tuple[type | None, Any]:
    """``class_lookup`` on behalf of the captured program: that it finds the same next time is guarded.

    Classes of libraries do not change. A plain value is guarded by who reads it; that it is there, here.
    """
    key = (cls, name, after)
    if key not in state.class_entries:
        owner, entry = state.class_entries[key] = class_lookup(cls, name, after)
        order = cls.__mro__
        order = order if after is None else order[order.index(after) + 1 :]
        for searched in order:
            if is_library_object(searched):
                if searched is owner:
                    break
                continue
            names = AttributeSource(state.reference_source(searched.__qualname__, searched), "__dict__")
            if searched is not owner:
                state.guards.absent(names, name)
                continue
            if hasattr(type(entry), "__get__"):
                state.guards.is_object(ItemSource(names, name), entry)
            else:
                state.guards.present(names, name)
            break
    return state.class_entries[key]


def wrap_class_entry(state: CaptureState, cls: type, owner: type, name: str, entry: Any) -> Value:
    """The value of a raw entry of a class, guarded unless the class is a library's."""
    if is_library_object(owner):
        return state.wrap(entry, None)
    source = state.reference_source(cls.__qualname__, cls)
    if isinstance(entry, types.FunctionType):
        # ``cls.name`` is the function itself, and sees an override that is added later.
        path: Source = AttributeSource(state.reference_source(owner.__qualname__, owner), name)
        return state.wrap(entry, path)
    if isinstance(entry, (staticmethod, classmethod)):
        raise state.unsupported("descriptor", f"the descriptor {cls.__qualname__}.{name} as a value")
    return state.wrap(entry, AttributeSource(source, name))


def guard_entry(state: CaptureState, owner: type, name: str, entry: Any) -> None:
    """The class holds this very descriptor."""
    if not is_library_object(owner):
        names = AttributeSource(state.reference_source(owner.__qualname__, owner), "__dict__")
        state.guards.is_object(ItemSource(names, name), entry)


def changed_class_attribute(state: CaptureState, cls: type, name: str) -> Value | None:
    """What the captured call stored in a class under this name; None where the class is as it was."""
    if not state.effects.classes:
        return None
    for entry in cls.__mro__:
        changed = state.effects.classes.get((entry, name))
        if changed is not None and changed is not MISSING:
            return changed
        if changed is None and name in entry.__dict__:
            return None
    if any((entry, name) in state.effects.classes for entry in cls.__mro__):
        raise state.unsupported("class-attribute", f"{name!r} of {cls.__qualname__} after its deletion")
    return None
