"""Dictionaries with their views."""

from __future__ import annotations

import collections
import enum
import math
import types
from typing import Any, ClassVar

from gradsplit.compile_core.capture.values.base import (
    CaptureState,
    LazyValue,
    SymbolicRaise,
    Value,
    stored_attribute,
)
from gradsplit.compile_core.capture.values.constants import ConstantValue, MethodOwner, SequenceIterator
from gradsplit.compile_core.capture.values.containers import (
    ContainerValue,
    Item,
    SequenceValue,
    WatchingIterator,
)
from gradsplit.compile_core.capture.values.hash_keys import ComputedKey, IdentityValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import EntrySource, KeySource, KeysSource


class DictValue(ContainerValue):
    """A dictionary. Of an existing one only the entries that were read are guarded, until its keys matter.

    An ``OrderedDict`` may have attributes: those of an existing one lie on ``real_owner``, and ``changes`` holds those
    that were stored in the frame.
    """

    real_owner: Any = None

    def __init__(
        self,
        entries: dict[Any, tuple[Value, Item]],
        cls: type = dict,
        source: Any = None,
        default_factory: Value | None = None,
    ) -> None:
        self.entries = entries
        self.cls = cls
        self.source = source
        self.default_factory = default_factory
        self.keys_guarded = source is None
        self.original_keys = tuple(entries)
        self.changes: dict[str, Value] = {}

    def guard_keys(self, state: CaptureState) -> None:
        if not self.keys_guarded and self.source is not None:
            self.keys_guarded = True
            if all(map(_is_known, self.original_keys)):
                state.guards.keys(self.source, self.original_keys)
                return
            state.guards.length(self.source, len(self.original_keys))
            keys = KeysSource(self.source)
            for index, key in enumerate(self.original_keys):
                # Literals are guarded by their value, all other keys by being the object that is known.
                found = state.wrap(key, KeySource(keys, index))
                if key in self.entries:
                    item = self.entries[key][1]
                    if isinstance(item, LazyValue) and found.source is not None and not _is_known(key):
                        item = LazyValue(item.real, EntrySource(self.source, found.source))
                    self.entries[key] = (found, item)

    def before_change(self, state: CaptureState) -> None:
        self.guard_keys(state)
        super().before_change(state)

    def get(self, state: CaptureState, key: Any) -> Value:
        key_value, item = self.entries[key]
        if isinstance(item, LazyValue) and not _is_known(key) and self.source is not None:
            if key_value.source is None:
                self.guard_keys(state)
                key_value = self.entries[key][0]
            place = key_value.source
            if place is None and isinstance(key_value, ReferenceValue):
                place = state.reference_source("key", key)  # of a library, and the same at each call
            if place is None:
                raise state.unsupported("dict-key", f"a dictionary key of type {type(key).__name__}")
            item = LazyValue(item.real, EntrySource(self.source, place))
        real = state.realize(item)
        self.entries[key] = (key_value, real)
        return real

    def held(self, state: CaptureState) -> dict[Any, Value]:
        """All items by the real keys, which are guarded."""
        self.guard_keys(state)
        return {key: self.get(state, key) for key in list(self.entries)}

    def pairs(self, state: CaptureState) -> list[tuple[Value, Value]]:
        """Keys and items."""
        held, entries = self.held(state), self.entries
        return [(entries[key][0], item) for key, item in held.items()]

    def find(self, state: CaptureState, key: Value) -> Value | None:
        """The item of a key; None where there is none, which is then guarded."""
        real = key.hash_key(state)
        if self.source is not None and (_is_computed(real) or isinstance(key, IdentityValue)):
            raise state.unsupported("dict-key", f"{key.describe()} looked up in a dictionary from outside")
        if real in self.entries:
            is_literal = isinstance(key, ConstantValue)  # 1 may be found as True, which the dictionary keeps
            if key.source is not None and self.entries[real][0].source is None and not is_literal:
                self.entries[real] = (key, self.entries[real][1])
            return self.get(state, real)
        if not self.keys_guarded and self.source is not None:
            if _is_known(real):
                state.guards.absent(self.source, real)
            elif key.source is not None:
                state.guards.absent_object(self.source, key.source)
            else:
                self.guard_keys(state)
        return None

    def as_constant(self) -> Any:
        if self.cls is not dict or any(isinstance(item, LazyValue) for _, item in self.entries.values()):
            return super().as_constant()
        if not self.keys_guarded:
            return super().as_constant()
        return {
            key.as_constant(): item.as_constant()
            for key, item in self.entries.values()
            if not isinstance(item, LazyValue)
        }

    def graph_argument(self, state: CaptureState) -> Any:
        return {key: item.graph_argument(state) for key, item in self.held(state).items()}

    def length(self, state: CaptureState) -> int:
        self.guard_keys(state)
        return len(self.entries)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        found = self.find(state, key)
        if found is not None:
            return found
        if self.default_factory is not None:
            made = self.default_factory.call(state, [], {})
            self.set_item(state, key, made)
            return made
        raise state.raise_exception(KeyError, key)

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        real = key.hash_key(state)
        if self.source is not None and self.original_keys and _is_computed(real):
            raise state.unsupported("dict-key", f"{key.describe()} stored in a dictionary from outside")
        if self.original_keys and not _is_known(real):
            self.find(state, key)  # whether it is there already is guarded
        if real in self.entries and self.entries[real][1] is value:
            return  # the very object that is there already
        self.before_change(state)
        kept = self.entries[real][0] if real in self.entries else key
        self.entries[real] = (kept, value)

    def delete_item(self, state: CaptureState, key: Value) -> None:
        if self.find(state, key) is None:
            raise state.raise_exception(KeyError, key)
        self.before_change(state)
        del self.entries[key.hash_key(state)]

    def contains(self, state: CaptureState, item: Value) -> bool:
        real = item.hash_key(state)
        if self.source is not None and not self.keys_guarded and real in self.entries and _is_known(real):
            state.guards.present(self.source, real)
            return True
        return self.find(state, item) is not None

    def key_values(self, state: CaptureState) -> list[Value]:
        self.guard_keys(state)
        return [key for key, _ in self.entries.values()]

    def iterate(self, state: CaptureState) -> Value:
        return DictIterator(self, list(self.key_values(state)), "keys")

    def do_keys(self, state: CaptureState) -> Value:
        return DictView(self, "keys")

    def do_values(self, state: CaptureState) -> Value:
        return DictView(self, "values")

    def do_items(self, state: CaptureState) -> Value:
        return DictView(self, "items")

    def do_get(self, state: CaptureState, key: Value, default: Value | None = None) -> Value:
        found = self.find(state, key)
        return found if found is not None else default or ConstantValue(None)

    def do_setdefault(self, state: CaptureState, key: Value, default: Value | None = None) -> Value:
        if self.find(state, key) is None:
            self.set_item(state, key, default or ConstantValue(None))
        return self.get_item(state, key)

    def do_pop(self, state: CaptureState, key: Value, default: Value | None = None) -> Value:
        found = self.find(state, key)
        if found is None and default is not None:
            return default
        self.delete_item(state, key)  # raises where there is none
        assert found is not None
        return found

    def do_update(self, state: CaptureState, other: Value | None = None, /, **kwargs: Value) -> None:
        pairs = None if other is None else mapping_pairs(state, other)
        if pairs is not None:
            for key_value, item in pairs:
                self.set_item(state, key_value, item)
        elif other is not None:
            for number, pair in enumerate(state.items_of(other)):
                self.set_item(
                    state, *_key_and_item(state, pair, f"dictionary update sequence element #{number}")
                )
        for name, item in kwargs.items():
            self.set_item(state, ConstantValue(name), item)

    def do_copy(self, state: CaptureState) -> Value:
        held: Any = zip(self.held(state), self.pairs(state), strict=True)
        return DictValue(dict(held), self.cls, default_factory=self.default_factory)

    def do_clear(self, state: CaptureState) -> None:
        self.before_change(state)
        self.entries.clear()

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "default_factory" and self.cls is collections.defaultdict:
            return self.default_factory or ConstantValue(None)
        if self._is_stored(name):
            return stored_attribute(state, self, self.real_owner, name)
        return super().get_attribute(state, name)

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if not self._is_stored(name) or self.trusted:
            super().set_attribute(state, name, value)
        self.changes[name] = value
        state.effects.attribute_changed(self, name)

    def _is_stored(self, name: str) -> bool:
        return self.cls is collections.OrderedDict and not hasattr(self.cls, name)

    def do_popitem(self, state: CaptureState, last: Value | None = None) -> Value:
        self.guard_keys(state)
        if not self.entries:
            shown = (
                "dictionary is empty"
                if self.cls is collections.OrderedDict
                else "popitem(): dictionary is empty"
            )
            raise state.raise_exception(KeyError, shown)
        if last is not None and self.cls is not collections.OrderedDict:
            raise TypeError("dict.popitem takes no arguments")
        at_the_end = last is None or last.truth(state)
        real = next(reversed(self.entries) if at_the_end else iter(self.entries))
        key, item = self.entries[real][0], self.get(state, real)
        self.delete_item(state, key)
        return SequenceValue([key, item], tuple)

    def do_move_to_end(self, state: CaptureState, key: Value, last: Value | None = None) -> None:
        item = self.find(state, key)
        if item is None:
            raise state.raise_exception(KeyError, key)
        self.before_change(state)
        entry = self.entries.pop(key.hash_key(state))
        if last is None or last.truth(state):
            self.entries[key.hash_key(state)] = entry
        else:
            self.entries = {key.hash_key(state): entry, **self.entries}

    def do___reversed__(self, state: CaptureState) -> Value:
        return SequenceIterator(list(reversed(self.key_values(state))), type(reversed({})))


def new_dict(pairs: list[tuple[Value, Value]], state: CaptureState, cls: type = dict) -> DictValue:
    """A dictionary built in the frame."""
    made = DictValue({}, cls)
    for key, value in pairs:
        real = key.hash_key(state)
        kept = made.entries[real][0] if real in made.entries else key
        made.entries[real] = (kept, value)
    return made


def _key_and_item(state: CaptureState, pair: Value, name: str) -> tuple[Value, Value]:
    try:
        items = state.items_of(pair)
    except SymbolicRaise as raised:
        if not issubclass(raised.value.python_type(), TypeError):
            raise
        raise state.raise_exception(TypeError, f"cannot convert {name} to a sequence") from None
    if len(items) != 2:
        raise state.raise_exception(ValueError, f"{name} has length {len(items)}; 2 is required")
    return items[0], items[1]


def mapping_pairs(state: CaptureState, value: Value) -> list[tuple[Value, Value]] | None:
    """Keys and items of a mapping as ``dict.update`` reads them; None of what has no method ``keys``."""
    content = getattr(value, "content", None)
    if isinstance(content, DictValue) and value.python_type().__iter__ is dict.__iter__:
        value = content  # then not even the methods of a subclass are asked
    if isinstance(value, DictValue):
        return value.pairs(state)
    if not hasattr(value.python_type(), "keys"):
        return None
    keys = state.items_of(value.get_attribute(state, "keys").call(state, [], {}))
    return [(key, value.get_item(state, key)) for key in keys]


def _is_computed(key: Any) -> bool:
    """Whether the program's own methods say what a key equals, which keys from outside are not asked."""
    if isinstance(key, (tuple, frozenset)):
        return any(map(_is_computed, key))
    return isinstance(key, ComputedKey)


def _is_known(key: Any) -> bool:
    """Whether a key is known by its value, so that a guard can ask for it and a source can name it."""
    if isinstance(key, tuple):
        return type(key) is tuple and all(_is_known(item) for item in key)
    if isinstance(key, float):
        return not math.isnan(key)
    return type(key) in (str, int, bool, type(None), bytes) or isinstance(key, (enum.Enum, type))


class ReadOnlyView(DictValue):
    """``types.MappingProxyType``: reads what the mapping holds, and cannot be changed."""

    def __init__(self, mapping: DictValue, source: Any = None) -> None:
        super().__init__({}, types.MappingProxyType, source)
        self.mapping = mapping

    @property
    def entries(self) -> dict[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mapping.entries

    @entries.setter
    def entries(self, entries: Any) -> None:
        """The entries are the mapping's."""

    def guard_keys(self, state: CaptureState) -> None:
        self.mapping.guard_keys(state)

    def get(self, state: CaptureState, key: Any) -> Value:
        return self.mapping.get(state, key)

    def find(self, state: CaptureState, key: Value) -> Value | None:
        return self.mapping.find(state, key)

    def contains(self, state: CaptureState, item: Value) -> bool:
        return self.mapping.contains(state, item)

    def do_copy(self, state: CaptureState) -> Value:
        return self.mapping.do_copy(state)

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(self.cls, self.mapping)

    def before_change(self, state: CaptureState) -> None:
        raise state.raise_exception(TypeError, "'mappingproxy' object does not support item assignment")


class DictIterator(WatchingIterator):
    text = "dictionary changed size during iteration"

    def __init__(self, owner: DictValue, items: list[Item], what: str) -> None:
        super().__init__(owner, items, type(iter(getattr({}, what)())))
        self.what = what
        self._keys = [key for key, _ in owner.entries.values()]

    def advance(self, state: CaptureState) -> Value | None:
        item = super().advance(state)
        if [key for key, _ in self.owner.entries.values()] != self._keys:
            raise state.unsupported(
                "dict-iteration", "a dictionary whose keys change while it is iterated over"
            )
        return item

    def rebuild(self, writer: Any) -> str | None:
        if id(self.owner) in writer.state.effects.containers or self.owner.cls is not dict:
            return None
        if not self.items:
            return writer.made(iter, ())
        name = writer.bind(f"iter({writer.emit(self.owner)}.{self.what}())")
        if self.index:
            writer.lines.append(f"for _ in range({self.index}): next({name})")
        return name


class DictView(MethodOwner):
    """``keys()``, ``values()`` or ``items()`` of a dictionary."""

    _types: ClassVar = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}

    def __init__(self, owner: DictValue, what: str) -> None:
        self.owner = owner
        self.what = what

    def python_type(self) -> type:
        if self.owner.cls is collections.OrderedDict:
            return type(getattr(collections.OrderedDict(), self.what)())
        return self._types[self.what]

    def truth(self, state: CaptureState) -> bool:
        return self.length(state) != 0

    def length(self, state: CaptureState) -> int:
        return self.owner.length(state)

    def iterate(self, state: CaptureState) -> Value:
        if self.what == "keys":
            return self.owner.iterate(state)
        pairs = self.owner.pairs(state)
        items = [item if self.what == "values" else SequenceValue([key, item], tuple) for key, item in pairs]
        return DictIterator(self.owner, list(items), self.what)

    def contains(self, state: CaptureState, item: Value) -> bool:
        if self.what == "keys":
            return self.owner.contains(state, item)
        return any(state.equal(member, item) for member in state.items_of(self))
