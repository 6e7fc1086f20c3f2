"""Objects with a ``__dict__``, and it as a value: a dictionary whose entries are the attributes of an object."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import Item
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.ir.sources import ItemSource, Source

# Stands for an attribute that was deleted in the frame.
MISSING: Any = object()


class AttributeOwner(Value):
    """An object with a ``__dict__``. ``changes`` holds attributes that were stored in the frame, MISSING where they
    were deleted, ``deleted`` the existing ones that were deleted, even if they were stored again."""

    real: Any
    changes: dict[str, Value]
    deleted: set[str]
    _dict: InstanceDict | None = None

    def real_dict(self) -> dict[str, Any]:
        """The ``__dict__`` of the real object before the call; empty for an object made in the frame."""
        raise NotImplementedError

    def dict_source(self) -> Source | None:
        """Where the object's own ``__dict__`` is found without running any code of its class."""
        raise NotImplementedError

    def instance_dict(self, state: CaptureState) -> Value:
        self._dict = self._dict or InstanceDict(self)
        return self._dict

    def own_attribute(self, state: CaptureState, name: str) -> Value | None:
        """An attribute of the object itself, None where there is none."""
        if name in self.changes:
            changed = self.changes[name]
            return None if changed is MISSING else changed
        own = self.real_dict()
        if name not in own:
            return None
        place = self.dict_source()
        return state.wrap(own[name], None if place is None else ItemSource(place, name))

    def guard_absent(self, state: CaptureState, name: str) -> None:
        place = self.dict_source()
        if place is not None and name not in self.changes:
            state.guards.absent(place, name)

    def change(self, state: CaptureState, name: str, value: Value) -> None:
        if self.real is not None and self.source is None:
            raise state.unsupported(
                "library-state", f"a change of {self.describe()}, which belongs to a library"
            )
        self.before_change_of_content(state)
        self.changes[name] = value
        state.effects.attribute_changed(self, name)

    def forget(self, state: CaptureState, name: str) -> None:
        """Delete an attribute that is there."""
        if name in self.real_dict() or name not in self.changes:
            self.change(state, name, MISSING)
            self.deleted.add(name)
        else:
            del self.changes[name]
            state.effects.attributes.pop((id(self), name), None)


class InstanceDict(DictValue):
    """Reads and stores go to the owner, so that both ways to an attribute see the same."""

    def __init__(self, instance: AttributeOwner) -> None:
        self.instance = instance
        self._keys: dict[str, Value] = {}
        super().__init__({}, dict, instance.dict_source())
        self.original_keys = tuple(instance.real_dict())

    @property
    def entries(self) -> dict[Any, tuple[Value, Item]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The attributes as they are now, in the order of the real dictionary."""
        place = self.instance.dict_source()
        items: dict[str, Item] = {
            name: LazyValue(item, None if place is None else ItemSource(place, name))
            for name, item in self.instance.real_dict().items()
            if name not in self.instance.deleted
        }
        items |= {name: item for name, item in self.instance.changes.items() if item is not MISSING}
        return {
            name: (self._keys.setdefault(name, ConstantValue(name)), item) for name, item in items.items()
        }

    @entries.setter
    def entries(self, entries: Any) -> None:
        """The attributes are the owner's."""

    def get(self, state: CaptureState, key: Any) -> Value:
        found = self.instance.own_attribute(state, key)
        assert found is not None
        return found

    def find(self, state: CaptureState, key: Value) -> Value | None:
        name = key.hash_key(state)
        if not isinstance(name, str):
            raise state.unsupported("dict-key", f"the key {name!r} of the __dict__ of an object")
        found = self.instance.own_attribute(state, name)
        if found is None:
            self.instance.guard_absent(state, name)
        return found

    def contains(self, state: CaptureState, item: Value) -> bool:
        return self.find(state, item) is not None

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        name = key.hash_key(state)
        if not isinstance(name, str):
            raise state.unsupported("dict-key", f"the key {name!r} of the __dict__ of an object")
        self.instance.change(state, name, value)

    def delete_item(self, state: CaptureState, key: Value) -> None:
        if self.find(state, key) is None:
            raise state.raise_exception(KeyError, key.hash_key(state))
        self.instance.forget(state, key.hash_key(state))

    def rebuild(self, writer: Any) -> str:
        name: str = writer.made(object.__getattribute__, self.instance, "__dict__")
        return name

    def do_clear(self, state: CaptureState) -> None:
        for key in self.key_values(state):
            self.delete_item(state, key)
