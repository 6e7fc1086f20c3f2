"""Tuples, lists and slices: built in the frame, or existing and read item by item."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import (
    LIST_ITERATOR,
    MethodOwner,
    SequenceIterator,
    ask_python,
    is_none,
)
from gradsplit.compile_core.capture.values.stand_ins import StandIn

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


def python_method(name: str) -> Callable[..., Any]:
    """A method that Python's own class has."""
    return lambda owner, state, *args, **kwargs: owner.in_python(state, name, *args, **kwargs)


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
        index = state.as_index(key, f"{self.cls.__name__} indices must be integers or slices, not {{}}")
        if not -len(self.items) <= index < len(self.items):
            raise state.raise_exception(IndexError, f"{self.cls.__name__} index out of range")
        return self.get(state, index % len(self.items))

    def contains(self, state: CaptureState, item: Value) -> bool:
        return any(state.equal(member, item) for member in self.all(state))

    def iterate(self, state: CaptureState) -> Value:
        # A list's iterator sees later changes of the list, so it shares the items.
        if self.cls is list:
            return SequenceIterator(self.items, LIST_ITERATOR, self)
        return SequenceIterator(list(self.items))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        fields = sequence_fields(self.cls)
        if name in fields:
            return self.get(state, fields.index(name))
        if hasattr(self.cls, "_fields") and name not in self.methods.keys() - ContainerValue.methods.keys():
            return state.class_attribute(self, name)
        return super().get_attribute(state, name)

    def python_object(self, items: list[Any]) -> Any:
        """An object of Python's own class with other items in the place of the values."""
        return (list if self.cls is list else tuple)(items)

    def in_python(self, state: CaptureState, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the method of Python's own class gives, run for real: only one that compares needs to see the items."""
        compares = name in ("index", "count", "remove")
        held = self.python_object([StandIn(state, item) for item in self.items] if compares else self.items)
        given = [StandIn(state, value) if isinstance(value, Value) else value for value in args]
        found = ask_python(state, getattr(held, name), *given, **kwargs)
        self.take(state, name, [part.item if isinstance(part, StandIn) else part for part in held])
        return state.realize(found) if isinstance(found, (Value, LazyValue)) else found

    def take(self, state: CaptureState, name: str, items: list[Item]) -> None:
        """The items after a method, which may have read some."""
        self.items[:] = items

    do_index, do_count = map(python_method, ("index", "count"))

    def do_numel(self, state: CaptureState) -> Value:
        return state.wrap(math.prod, None).call(state, [self], {})


class ListValue(SequenceValue):
    """A list, with its changes."""

    def __init__(self, items: list[Item], source: Any = None) -> None:
        super().__init__(items, list, source)

    do_insert, do_pop, do_remove = map(python_method, ("insert", "pop", "remove"))
    do_clear, do_reverse = map(python_method, ("clear", "reverse"))

    def take(self, state: CaptureState, name: str, items: list[Item]) -> None:
        if name not in ("index", "count"):
            self.before_change(state)
        super().take(state, name, items)

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        given = state.items_of(value) if isinstance(key, SliceValue) else value
        self.in_python(state, "__setitem__", _place(state, key), given)

    def delete_item(self, state: CaptureState, key: Value) -> None:
        self.in_python(state, "__delitem__", _place(state, key))

    def put(self, state: CaptureState, items: list[Item]) -> None:
        """Adds items at the end."""
        self.before_change(state)
        self.items.extend(items)

    def do_append(self, state: CaptureState, item: Value) -> None:
        self.put(state, [item])

    def do_extend(self, state: CaptureState, items: Value) -> None:
        self.put(state, list(state.items_of(items, hinted=True)))

    def do_copy(self, state: CaptureState) -> Value:
        return ListValue(list(self.all(state)))

    def do_sort(self, state: CaptureState, *, key: Value | None = None, reverse: Value | None = None) -> None:
        self.take(state, "sort", list(sorted_values(state, self.all(state), key, reverse)))


def sorted_values(
    state: CaptureState, items: list[Value], key: Value | None, reverse: Value | None
) -> list[Value]:
    """Sort stably, with the same comparisons as Python."""

    def key_of(item: StandIn) -> StandIn:
        return item if key is None or is_none(key) else StandIn(state, key.call(state, [item.value], {}))

    backwards = reverse is not None and reverse.truth(state)
    return [
        item.value for item in sorted((StandIn(state, item) for item in items), key=key_of, reverse=backwards)
    ]


def sequence_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a named tuple or of torch's structured results."""
    fields = getattr(cls, "_fields", None)
    if fields is not None:
        return tuple(fields)
    if cls.__module__ == "torch.return_types":
        return tuple(getattr(cls, "__match_args__", ()))
    return ()


def _place(state: CaptureState, key: Value) -> Any:
    if isinstance(key, SliceValue):
        return key.as_constant()
    return state.as_index(key, "list indices must be integers or slices, not {}")


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

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(slice, *self.parts)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in ("start", "stop", "step"):
            return self.parts[("start", "stop", "step").index(name)]
        return super().get_attribute(state, name)
