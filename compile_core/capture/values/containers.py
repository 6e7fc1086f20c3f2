"""Tuples, lists and slices: built in the frame, or existing and read item by item."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import (
    ConstantValue,
    MethodOwner,
    SequenceIterator,
    fold,
    is_none,
)

Item = Value | LazyValue


_SPECIAL = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__iter__")


class ContainerValue(MethodOwner):
    """What the containers share.

    ``trusted`` marks an existing container without a source, which is read-only. ``owner`` is the instance of a
    user's subclass whose content the container is.
    """

    cls: type
    trusted = False
    owner: Value | None = None

    def truth(self, state: CaptureState) -> bool:
        return self.length(state) != 0

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if not hasattr(self.cls, name):
            raise state.no_attribute(self.cls, name)
        if name in _SPECIAL and name not in self.methods:
            of_type = state.wrap(getattr(self.cls, name), None)
            return state.wrap(functools.partial, None).call(state, [of_type, self], {})
        return super().get_attribute(state, name)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        raise state.raise_exception(TypeError, f"{self.cls.__name__!r} object is not callable")

    def hash_key(self, state: CaptureState) -> Any:
        raise state.raise_exception(TypeError, f"unhashable type: {self.cls.__name__!r}")

    def before_change(self, state: CaptureState) -> None:
        if self.trusted:
            raise state.unsupported(
                "library-state", f"a change of {self.describe()} that belongs to a library"
            )
        if self.owner is not None:
            self.owner.before_change_of_content(state)
        state.effects.container_changed(self)

    def do___repr__(self, state: CaptureState) -> Value:
        """The text of a container is made of those of its items."""
        return state.representation_of(self)

    do___str__ = do___repr__


class SequenceValue(ContainerValue):
    """A tuple, list, or a subclass of tuple with named fields. ``is_literal`` marks a constant of the code."""

    is_literal = False

    def __init__(self, items: list[Item], cls: type, source: Any = None) -> None:
        self.items = items
        self.cls = cls
        self.source = source

    def get(self, state: CaptureState, index: int) -> Value:
        item = state.realize(self.items[index])
        self.items[index] = item
        return item

    def all(self, state: CaptureState) -> list[Value]:
        return [self.get(state, index) for index in range(len(self.items))]

    def as_constant(self) -> Any:
        items = [item.real if isinstance(item, LazyValue) else item.as_constant() for item in self.items]
        if any(isinstance(item, LazyValue) for item in self.items):
            return super().as_constant()
        if self.cls in (tuple, list, torch.Size):
            return self.cls(items)
        if hasattr(self.cls, "_fields"):
            return self.cls(*items)
        return super().as_constant()

    def hash_key(self, state: CaptureState) -> Any:
        if not issubclass(self.cls, tuple) and self.cls.__hash__ is None:
            raise state.raise_exception(TypeError, f"unhashable type: {self.cls.__name__!r}")
        return tuple(item.hash_key(state) for item in self.all(state))

    def graph_argument(self, state: CaptureState) -> Any:
        items = [item.graph_argument(state) for item in self.all(state)]
        return items if self.cls is list else tuple(items)

    def length(self, state: CaptureState) -> int:
        return len(self.items)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        if isinstance(key, SliceValue):
            picked = list(range(len(self.items)))[key.as_constant()]
            if self.cls is tuple and picked == list(range(len(self.items))):
                return self
            cls = self.cls if self.cls in (list, torch.Size) else tuple
            items: list[Item] = [self.get(state, index) for index in picked]
            return ListValue(items) if cls is list else SequenceValue(items, cls)
        index = state.as_index(key, f"{self.cls.__name__} indices must be integers or slices")
        if not -len(self.items) <= index < len(self.items):
            raise state.raise_exception(IndexError, f"{self.cls.__name__} index out of range")
        return self.get(state, index % len(self.items))

    def contains(self, state: CaptureState, item: Value) -> bool:
        return any(state.equal(member, item) for member in self.all(state))

    def iterate(self, state: CaptureState) -> Value:
        # A list's iterator sees later changes of the list, so it shares the items.
        if self.cls is list:
            return SequenceIterator(self.items, type(iter([])), self)
        return SequenceIterator(list(self.items), type(iter(())))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        fields = sequence_fields(self.cls)
        if name in fields:
            return self.get(state, fields.index(name))
        if hasattr(self.cls, "_fields") and name not in self.methods.keys() - ContainerValue.methods.keys():
            return state.class_attribute(self, name)
        return super().get_attribute(state, name)

    def do_index(self, state: CaptureState, item: Value, *limits: Value) -> int:
        places = range(len(self.items))[slice(*_bounds(limits))]
        for position in places:
            if state.equal(self.get(state, position), item):
                return position
        if issubclass(self.cls, tuple):
            raise state.raise_exception(ValueError, "tuple.index(x): x not in tuple")
        shown = state.representation_of(item).as_constant()
        raise state.raise_exception(ValueError, f"{shown} is not in {self.cls.__name__}")

    def do_count(self, state: CaptureState, item: Value) -> int:
        return sum(state.equal(member, item) for member in self.all(state))

    def do_numel(self, state: CaptureState) -> Value:
        return state.wrap(math.prod, None).call(state, [self], {})

    def do___getitem__(self, state: CaptureState, key: Value) -> Value:
        return self.get_item(state, key)


def _bounds(limits: tuple[Value, ...]) -> list[int | None]:
    return [*(operator.index(limit.as_constant()) for limit in limits), *[None] * 2][: max(2, len(limits))]


class ListValue(SequenceValue):
    """A list, with its changes."""

    def __init__(self, items: list[Item], source: Any = None) -> None:
        super().__init__(items, list, source)

    def replace(self, state: CaptureState, items: list[Item]) -> None:
        self.before_change(state)
        self.items[:] = items

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        if isinstance(key, SliceValue):
            items = list(self.items)
            items[key.as_constant()] = state.items_of(value)
            self.replace(state, items)
            return
        index = _index(state, key)
        if not -len(self.items) <= index < len(self.items):
            raise state.raise_exception(IndexError, "list assignment index out of range")
        self.before_change(state)
        self.items[index] = value

    def delete_item(self, state: CaptureState, key: Value) -> None:
        items = list(self.items)
        if not isinstance(key, SliceValue):
            index = _index(state, key)
            if not -len(items) <= index < len(items):
                raise state.raise_exception(IndexError, "list assignment index out of range")
        del items[key.as_constant()]
        self.replace(state, items)

    def put(self, state: CaptureState, items: list[Item]) -> None:
        """Adds items at the end."""
        self.before_change(state)
        self.items.extend(items)

    def do_append(self, state: CaptureState, item: Value) -> None:
        self.put(state, [item])

    def do_extend(self, state: CaptureState, items: Value) -> None:
        self.put(state, list(state.items_of(items, hinted=True)))

    def repeat(self, state: CaptureState, times: Value) -> Value:
        count = fold(state, operator.index, [times], {}).as_constant()
        self.replace(state, self.items * count)
        return self

    def do_insert(self, state: CaptureState, index: Value, item: Value) -> None:
        items = list(self.items)
        items.insert(_index(state, index), item)
        self.replace(state, items)

    def do_pop(self, state: CaptureState, index: Value | None = None) -> Value:
        position = -1 if index is None else _index(state, index)
        if not -len(self.items) <= position < len(self.items):
            text = "pop index out of range" if self.items else "pop from empty list"
            raise state.raise_exception(IndexError, text)
        item = state.realize(self.items[position])
        self.before_change(state)
        self.items.pop(position)
        return item

    def do_remove(self, state: CaptureState, item: Value) -> None:
        for position, member in enumerate(self.all(state)):
            if state.equal(member, item):
                return self.delete_item(state, ConstantValue(position))
        named = ConstantValue(None) if self.cls is list else item
        fold(state, self.cls().remove, [named], {})  # raises, in the words of this version of Python
        return None

    def do_clear(self, state: CaptureState) -> None:
        self.replace(state, [])

    def do_reverse(self, state: CaptureState) -> None:
        self.replace(state, self.items[::-1])

    def do_copy(self, state: CaptureState) -> Value:
        return ListValue(list(self.all(state)))

    def do_sort(self, state: CaptureState, *, key: Value | None = None, reverse: Value | None = None) -> None:
        self.replace(state, list(sorted_values(state, self.all(state), key, reverse)))


def sorted_values(
    state: CaptureState, items: list[Value], key: Value | None, reverse: Value | None
) -> list[Value]:
    """Sort stably, with the same comparisons as Python."""
    keyed = items
    if key is not None and not is_none(key):
        keyed = [key.call(state, [item], {}) for item in items]
    backwards = reverse is not None and reverse.truth(state)
    order = list(range(len(items)))

    def by_less(one: int, other: int) -> int:
        return -int(state.less(keyed[one], keyed[other]))  # the sort asks for nothing but ``<``

    order.sort(key=functools.cmp_to_key(by_less), reverse=backwards)
    return [items[index] for index in order]


def sequence_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a named tuple or of torch's structured results."""
    fields = getattr(cls, "_fields", None)
    if fields is not None:
        return tuple(fields)
    if cls.__module__ == "torch.return_types":
        return tuple(getattr(cls, "__match_args__", ()))
    return ()


def _index(state: CaptureState, key: Value) -> int:
    return state.as_index(key, "list indices must be integers or slices")


class WatchingIterator(SequenceIterator):
    """An iterator over a container that must not be changed meanwhile, and what is said of it where it was."""

    text = "Set changed size during iteration"

    def __init__(self, owner: ContainerValue, items: list[Any], cls: type) -> None:
        super().__init__(items, cls)
        self.owner: Any = owner
        self._length = len(items)

    def advance(self, state: CaptureState) -> Value | None:
        if self.items and self.owner.length(state) != self._length:
            raise state.raise_exception(RuntimeError, self.text)
        return super().advance(state)


class SliceValue(Value):
    """A slice object."""

    cls = slice

    def __init__(self, parts: list[Value]) -> None:
        self.parts = parts

    def as_constant(self) -> Any:
        return slice(*(part.as_constant() for part in self.parts))

    def graph_argument(self, state: CaptureState) -> Any:
        return slice(*(part.graph_argument(state) for part in self.parts))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in ("start", "stop", "step"):
            return self.parts[("start", "stop", "step").index(name)]
        return super().get_attribute(state, name)
