"""Sets and frozensets.

The order in which a set gives out its members follows from their hashes and from the history of the set. A set whose
members are the same objects at every call, with the same hashes, is therefore mirrored by a real set that undergoes
the same operations; a set with other members has no order that a capture could know. The mirror of an existing set is
the list of its members in their order, until it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ContainerValue, SequenceValue, WatchingIterator
from gradsplit.compile_core.capture.values.hash_keys import ComputedKey
from gradsplit.compile_core.capture.values.mappings import DictValue, DictView
from gradsplit.compile_core.capture.values.references import ReferenceValue

Members = dict[Any, Value]


# Operators of sets: the methods that give the same as a new set, and in place.
OPERATORS = {
    "|": ("union", "update"),
    "&": ("intersection", "intersection_update"),
    "-": ("difference", "difference_update"),
    "^": ("symmetric_difference", "symmetric_difference_update"),
}
_RESULTS = {in_place: made for made, in_place in OPERATORS.values()}


def _test(name: str) -> Callable[..., bool]:
    return lambda one, state, other: getattr(set(one.members), name)(set(as_set(state, other).members))


def _making(name: str) -> Callable[..., Value]:
    return lambda one, state, *others: one.computed(state, name, [as_set(state, other) for other in others])


def _changing(name: str) -> Callable[..., None]:
    return lambda one, state, *others: one.change_to(state, name, [as_set(state, other) for other in others])


class SetValue(ContainerValue):
    """A set or frozenset: ``members`` by their keys, ``mirror`` the real set of the keys, None without an order."""

    def __init__(self, members: Members, cls: type = set, source: Any = None, mirror: Any = None) -> None:
        self.members = members
        self.cls = cls
        self.source = source
        self.mirror = mirror
        self.original = dict(members) if source is not None else {}

    def as_constant(self) -> Any:
        if self.mirror is not None:
            for member in self.members.values():
                member.as_constant()
            return self.cls(self.mirror)
        return self.cls(member.as_constant() for member in self.members.values())

    def hash_key(self, state: CaptureState) -> Any:
        if self.cls is set:
            raise state.raise_exception(TypeError, "unhashable type: 'set'")
        return frozenset(self.members)

    def length(self, state: CaptureState) -> int:
        return len(self.members)

    def contains(self, state: CaptureState, item: Value) -> bool:
        key = frozenset(item.members) if isinstance(item, SetValue) else item.hash_key(state)
        return self._has(state, key, item)

    def _has(self, state: CaptureState, key: Any, item: Value) -> bool:
        if self.source is not None and isinstance(key, ComputedKey):
            raise state.unsupported("set", f"{item.describe()} looked up in a set from outside")
        return key in self.members

    def ordered(self, state: CaptureState) -> list[Value]:
        """The members in the order of the real set."""
        if len(self.members) > 1 and self.mirror is None:
            raise state.unsupported("set-order", "the iteration order of a set", "iterate over sorted(...)")
        return self.arranged()

    def arranged(self) -> list[Value]:
        """The members, in the order of the real set where that is known."""
        return [self.members[key] for key in (self.members if self.mirror is None else self.mirror)]

    def iterate(self, state: CaptureState) -> Value:
        return WatchingIterator(self, list(self.ordered(state)), type(iter(set())))

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(self.cls, tuple(self.arranged()))

    def before_change(self, state: CaptureState) -> None:
        super().before_change(state)
        if self.source is not None:
            self.mirror = None  # its history is unknown

    # Single members

    def do_add(self, state: CaptureState, item: Value) -> None:
        key = item.hash_key(state)
        self.before_change(state)
        if not self._has(state, key, item):
            self.members[key] = item
            if self.mirror is not None and not is_stable(item):
                self.mirror = None
            if self.mirror is not None:
                self.mirror.add(key)

    def do_discard(self, state: CaptureState, item: Value) -> None:
        if self.contains(state, item):
            self._drop(state, item.hash_key(state))

    def do_remove(self, state: CaptureState, item: Value) -> None:
        if not self.contains(state, item):
            raise state.raise_exception(KeyError, item)
        self._drop(state, item.hash_key(state))

    def _drop(self, state: CaptureState, key: Any) -> None:
        self.before_change(state)
        del self.members[key]
        if self.mirror is not None:
            self.mirror.discard(key)

    def do_pop(self, state: CaptureState) -> Value:
        if not self.members:
            raise state.raise_exception(KeyError, "pop from an empty set")
        if self.mirror is None and len(self.members) > 1:
            raise state.unsupported("set-order", "set.pop() of a set whose order is not known")
        self.before_change(state)
        key = next(iter(self.members)) if self.mirror is None else self.mirror.pop()
        return self.members.pop(key)

    def do_clear(self, state: CaptureState) -> None:
        self.before_change(state)
        self.members.clear()
        if self.mirror is not None:
            self.mirror.clear()

    # Whole sets

    def do_copy(self, state: CaptureState) -> Value:
        if self.cls is frozenset:
            return self
        return self.computed(state, "copy", [])

    def computed(self, state: CaptureState, name: str, others: list[SetValue]) -> SetValue:
        """What a method makes of this set and others."""
        known = {}
        for other in (*reversed(others), self):
            known |= other.members
        keys = getattr(set(self.members), name)(*(list(other.members) for other in others))
        mirrors = [side.mirror for side in (self, *others)]
        mirror = None
        if all(isinstance(side, (set, frozenset)) for side in mirrors):
            mirror = getattr(mirrors[0], name)(*mirrors[1:])
        return SetValue({key: known[key] for key in keys}, self.cls, None, mirror)

    def change_to(self, state: CaptureState, name: str, others: list[SetValue]) -> None:
        """Change this set by the method of this name."""
        made = self.computed(state, _RESULTS[name], others)
        self.before_change(state)
        if self.mirror is not None and made.mirror is not None:
            getattr(self.mirror, name)(*(other.mirror for other in others))
        else:
            self.mirror = None
        self.members = made.members

    do_issubset, do_issuperset, do_isdisjoint = map(_test, ("issubset", "issuperset", "isdisjoint"))
    do_union, do_intersection, do_difference, do_symmetric_difference = map(_making, _RESULTS.values())
    do_update, do_intersection_update, do_difference_update, do_symmetric_difference_update = map(
        _changing, _RESULTS
    )


def new_set(state: CaptureState, items: list[Value], cls: type = set) -> SetValue:
    """A set of items that are added one after the other."""
    made = SetValue({}, set, None, set())
    for item in items:
        made.do_add(state, item)
    if cls is frozenset:
        made = SetValue(
            made.members, frozenset, None, None if made.mirror is None else frozenset(made.mirror)
        )
    return made


def as_set(state: CaptureState, value: Value, cls: type | None = None) -> SetValue:
    """An iterable as a set; its mirror is what Python would iterate over."""
    content = getattr(value, "content", None)
    if isinstance(content, SetValue):
        value = content
    if isinstance(value, SetValue):
        if cls is None or (cls is value.cls is frozenset):
            return value
        known = isinstance(value.mirror, (set, frozenset))
        mirror = cls(value.mirror) if known and cls is not None else None
        return SetValue(dict(value.members), cls or value.cls, None, mirror)
    if isinstance(value, DictView) and value.what == "keys":
        value = value.owner
    items = state.items_of(value)
    made = new_set(state, items, cls or set)
    if isinstance(value, DictValue) and made.mirror is not None:
        made.mirror = (cls or set)(dict.fromkeys(item.hash_key(state) for item in items))
    return made


def is_stable(value: Value) -> bool:
    """Whether a member is the same object with the same hash at every call for which the guards hold."""
    if isinstance(value, ConstantValue):
        is_nan = isinstance(value.value, float) and math.isnan(value.value)
        return not is_nan
    if isinstance(value, SequenceValue):
        return issubclass(value.cls, tuple) and all(
            isinstance(item, Value) and is_stable(item) for item in value.items
        )
    if isinstance(value, SetValue):
        return value.cls is frozenset and value.mirror is not None
    return isinstance(value, ReferenceValue)
