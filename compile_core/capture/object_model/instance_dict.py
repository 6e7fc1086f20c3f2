"""``x.__dict__`` as a value: a dictionary whose entries are the attributes of an object."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import Item
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.ir.sources import ItemSource, Source

# Stands for an attribute that was deleted in the frame.
MISSING: Any = object()


class AttributeOwner(Protocol):
    """What a view on attributes needs of the object."""

    changes: dict[str, Value]
    deleted: set[str]

    def real_dict(self) -> dict[str, Any]: ...
    def dict_source(self) -> Source | None: ...
    def own_attribute(self, state: CaptureState, name: str) -> Value | None: ...
    def guard_absent(self, state: CaptureState, name: str) -> None: ...
    def change(self, state: CaptureState, name: str, value: Value) -> None: ...
    def forget(self, state: CaptureState, name: str) -> None: ...


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

    def clear(self, state: CaptureState) -> Value:
        for key in self.key_values(state):
            self.delete_item(state, key)
        return ConstantValue(None)

    methods: ClassVar = DictValue.methods | {"clear": clear}
