"""Iterators that existed before the capture, as those of a loop with a graph break in it.

Where ``next`` runs no code of the program, a copy of the iterator tells what is to come, at capture and in each check:
an item is found at its place behind where the iterator stands, wherever that is. So what is captured of a round of a
loop holds for every round that is alike. The iterator itself moves when the graph has run, with the other effects.
"""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import IteratorValue
from gradsplit.compile_core.capture.values.iterators import Items, RealIterator, filter_values, map_values
from gradsplit.compile_core.ir.sources import ConvertedSource, ItemSource, Reference, Source

# Of itertools, those that can be copied alone, and those that hold iterators; CPython 3.12 warns of copies of them.
_CAN_BE_COPIED = sys.version_info < (3, 12)
_COPIED_ITERTOOLS = (itertools.count, itertools.repeat, itertools.product) if _CAN_BE_COPIED else ()
_NESTED_ITERTOOLS = (itertools.chain, itertools.islice, itertools.zip_longest) if _CAN_BE_COPIED else ()
_NESTED = (enumerate, zip, *_NESTED_ITERTOOLS)
# Whose iterators are made without code of the program.
_CONTAINERS = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    str,
    *(type(view) for view in ({}.keys(), {}.values(), {}.items())),
)

# Those over containers: a copy of one stands where it does, and moves by itself.
_OVER_CONTAINERS = (
    *(type(iter(made)) for made in ([], (), set(), "", "ä", b"", bytearray(), range(1), range(1 << 70))),
    *(type(iter(view)) for view in ({}.keys(), {}.values(), {}.items())),
    *(type(reversed(made)) for made in ([], (), range(1), {}, {}.values(), {}.items())),
    *_COPIED_ITERTOOLS,
)


class Ahead:
    """The items that an iterator has not given yet. It reads them from a copy, as far as it is asked."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._copy = _copy_of(iterator, {})
        self._items: list[Any] = []

    def __getitem__(self, place: int) -> Any:
        while len(self._items) <= place:
            try:
                self._items.append(next(self._copy))
            except StopIteration:
                raise IndexError(place) from None
        return self._items[place]

    def ends_at(self, place: int) -> bool:
        """Whether there are that many items and no more."""
        try:
            self[place]
        except IndexError:
            return len(self._items) == place
        return False


class _RunsCode(Exception):
    """To go on with the iterator may run code of the program."""


def _copy_of(iterator: Any, made: dict[int, Any]) -> Any:
    """An iterator that will give the same items; one that occurs twice in the original does so in the copy."""
    found = made.get(id(iterator))
    if found is not None:
        return found
    if type(iterator) in _OVER_CONTAINERS:
        copied = copy.copy(iterator)
    elif type(iterator) in _NESTED:
        cls, arguments, *state = iterator.__reduce__()

        def part(given: Any) -> Any:
            if type(given) is tuple:
                return tuple(map(part, given))
            return _copy_of(given, made) if isinstance(given, Iterator) else given

        copied = cls(*part(arguments))
        if state:
            copied.__setstate__(part(state[0]) if type(iterator) is itertools.chain else state[0])
        _waiting(iterator)  # its iterators are to be made without code of the program, too
    else:
        raise _RunsCode
    made[id(iterator)] = copied
    return copied


def _parts(iterator: Any) -> tuple[Any, ...]:
    """What ``zip``, ``map`` and ``filter`` were made of: they have no state of their own."""
    return iterator.__reduce__()[1]


def _inner(iterator: Any) -> list[Any]:
    """The iterators that one holds."""
    _, arguments, *state = iterator.__reduce__()
    given = state[0] if state and type(iterator) is itertools.chain else arguments
    return [part for part in given if isinstance(part, Iterator)]


def _waiting(iterator: Any) -> list[Any]:
    """What a chain has not begun with; nothing of other iterators."""
    if type(iterator) is not itertools.chain:
        return []
    _, _, *state = iterator.__reduce__()
    waiting = list(copy.copy(state[0][0])) if state else []
    if any(type(one) not in _CONTAINERS for one in waiting):
        raise _RunsCode
    return waiting


def _all_in(iterator: Any) -> list[Any]:
    """The iterator, and those that it holds."""
    inner = [] if type(iterator) in _OVER_CONTAINERS else _inner(iterator)
    return [iterator, *(part for held in inner for part in _all_in(held))]


def _share_nothing(*iterators: Any) -> bool:
    roots = [{id(part) for part in _all_in(one) if type(part) in _OVER_CONTAINERS} for one in iterators]
    return sum(map(len, roots)) == len(set().union(*roots))


class LiveIterator(IteratorValue):
    """An existing iterator whose ``next`` runs no code of the program; ``taken`` is how often it was called."""

    def __init__(self, real: Any, source: Source) -> None:
        self.real = real
        self.source: Source = source
        self.cls = type(real)
        self.taken = 0
        self._place = ConvertedSource(source, _AHEAD)
        self._ahead = Ahead(real)
        self._containers = _containers(real)

    def advance(self, state: CaptureState) -> Value | None:
        item = self.advance_unread(state)
        return None if item is None else state.realize(item)

    def advance_unread(self, state: CaptureState) -> LazyValue | None:
        if not self._containers.isdisjoint(_about_to_change(state)):
            # The copy knows of no change that is yet to be stored.
            raise state.unsupported("live-iterator", f"what {self.source} runs over changes meanwhile")
        state.effects.moved_on(self)
        place, self.taken = self.taken, self.taken + 1
        try:
            item = self._ahead[place]
        except IndexError:
            self.taken = place + 1  # who has ended stays so
            text = f"{self.source} has {place} items left"
            state.guards.add([self._place], f"{{0}}.ends_at({place})", [], text)
            return None
        text = f"{self.source} has {place + 1} items left, or more"
        state.guards.add([self._place], f"not {{0}}.ends_at({place})", [], text)
        source = ItemSource(self._place, place)
        parts = [ItemSource(source, at) for at in range(len(item))] if type(item) is tuple else []
        for part in (source, *parts):
            state.sizes.history.note_differs(part)  # numbers count the rounds, so that the next has another
        return LazyValue(item, source)

    def move(self, writer: Any) -> str:
        return f"for _ in range({self.taken}): next({writer.emit(self)}, None)"


def wrap_iterator(state: CaptureState, real: Any, source: Source) -> Value | None:
    """The value of an existing iterator; None where there is no rule for one of this kind."""
    if type(real) in (zip, map, filter):
        state.guards.type_is(source, type(real))
        return _in_parts(state, real, source)
    try:
        made = LiveIterator(real, source)
    except (_RunsCode, RuntimeError):  # the latter: a dictionary that has changed
        return None
    state.guards.type_is(source, type(real))
    others = state.live_iterators
    if others:
        if not _share_nothing(real, *(other.real for other in others)):
            return None
        names = ", ".join(f"{{{at}}}" for at in range(len(others) + 1))
        places = [source, *(other.source for other in others)]
        text = f"{source} and the other iterators have nothing in common"
        state.guards.add(places, f"{{c0}}({names})", [_share_nothing], text)
    others.append(made)
    return made


def _in_parts(state: CaptureState, real: Any, source: Source) -> Value:
    """Those that have no state of their own, as what they were made of: its functions are captured."""
    place = ConvertedSource(source, _PARTS)
    parts = _parts(real)
    state.guards.length(place, len(parts))
    values = [state.wrap(part, ItemSource(place, at)) for at, part in enumerate(parts)]
    if type(real) is zip:
        strict = len(real.__reduce__()) > 2
        state.guards.add(
            [source], f"(len({{0}}.__reduce__()) > 2) is {strict}", [], f"{source} is strict or not"
        )
        made: Value = RealIterator(zip(*(Items(state, value) for value in values), strict=strict))
    else:
        made = (map_values if type(real) is map else filter_values)(state, *values)
    made.source = source
    return made


def _containers(real: Any) -> set[int]:
    """What the iterator runs over."""
    runs_over = [
        gc.get_referents(part) if type(part) in _OVER_CONTAINERS else _waiting(part) for part in _all_in(real)
    ]
    return {id(container) for containers in runs_over for container in containers}


def _about_to_change(state: CaptureState) -> set[int]:
    """The containers that the effects so far will change, once the graph has run."""
    effects = state.effects
    if not (effects.containers or effects.attributes or effects.globals):
        return set()
    changed = {id(value) for value in effects.containers.values()}
    found = {
        place
        for place, (_, value) in state.known.items()
        if id(value) in changed or id(getattr(value, "content", None)) in changed
    }
    owners = [owner for owner in effects.attributes.values() if hasattr(owner, "real_dict")]
    return found | {id(owner.real_dict()) for owner in owners} | {place for place, _ in effects.globals}


_AHEAD = Reference("ahead", Ahead)
_PARTS = Reference("parts", _parts)
LIVE_ITERATORS = frozenset([*_OVER_CONTAINERS, *_NESTED, map, filter])
