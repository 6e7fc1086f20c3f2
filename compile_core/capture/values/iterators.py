"""Iterators that compute their items one by one: those of Python itself, fed with symbolic values, and generators' kin.

A real ``zip`` or ``map`` asks its iterables and functions for objects in exactly the order in which Python does; that
these objects are symbolic values makes no difference to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, IteratorValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.stand_ins import StandIn


class RealIterator(IteratorValue):
    """A real iterator over symbolic values, over tuples of them, or over iterators of them.

    ``is_closed`` says that nothing outside can change or see what it has left.
    """

    def __init__(self, iterator: Iterator[Any], is_closed: bool = False) -> None:
        self.iterator = iterator
        self.cls = type(iterator)
        self.is_closed = is_closed

    def advance(self, state: CaptureState) -> Value | None:
        try:
            return _symbolic(next(self.iterator))
        except StopIteration:
            return None
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), StopIteration):
                raise
            self.stopped = raised  # of a function, which ends who calls it
            return None
        except ValueError as error:
            if not str(error).startswith("zip()"):
                raise
            raise state.raise_exception(ValueError, *error.args) from None

    def rebuild(self, writer: Any) -> str | None:
        if self.cls in (zip, map, filter, enumerate):
            _, given, *strict = self.iterator.__reduce__()  # type: ignore[misc]
            parts = [getattr(part, "value", part) for part in given]
            return writer.made(self.cls, *parts, **({"strict": bool(strict)} if self.cls is zip else {}))
        if not self.is_closed:
            return None
        items = list(self.iterator)
        self.iterator = iter(items)
        return writer.made(iter, tuple(map(_symbolic, items)))


def _symbolic(item: Any) -> Value:
    if isinstance(item, Value):
        return item
    if isinstance(item, tuple):
        return SequenceValue([_symbolic(part) for part in item], tuple)
    if isinstance(item, StandIn):
        return item.value
    return ConstantValue(item) if type(item) is int else RealIterator(item)


class Items:
    """A symbolic iterable as a real one."""

    def __init__(self, state: CaptureState, iterable: Value) -> None:
        self.state = state
        self.value = iterable.iterate(state)

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Value:
        item = self.value.advance(self.state)
        if item is None:
            raise StopIteration
        return item


class Indexed:
    """An object that has only ``__getitem__``, of which Python itself makes an iterator: 0, 1, 2 … until IndexError."""

    def __init__(self, state: CaptureState, value: Value) -> None:
        self.state = state
        self.value = value

    def __getitem__(self, index: int) -> Value:
        try:
            return self.value.get_item(self.state, ConstantValue(index))
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), (IndexError, StopIteration)):
                raise
            raise IndexError from None


class Called:
    """A symbolic function as a real one; ``then`` is done with what it gives."""

    def __init__(self, state: CaptureState, function: Value, then: Callable[..., Any] | None = None) -> None:
        self.state = state
        self.value = function
        self._then = then

    def __call__(self, *items: Value) -> Any:
        found = items[0] if is_none(self.value) else self.value.call(self.state, list(items), {})
        return found if self._then is None else self._then(self.state, found)


def predicate(state: CaptureState, function: Value) -> Called:
    """None stands for the truth value itself."""
    return Called(state, function, lambda state, found: found.truth(state))


class CountIterator(IteratorValue):
    cls = itertools.count

    def __init__(self, value: Any, step: Any) -> None:
        self.value = value
        self.step = step

    def advance(self, state: CaptureState) -> Value | None:
        value = self.value
        self.value = value + self.step
        return ConstantValue(value)

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(self.cls, self.value, self.step)


class ChainIterator(IteratorValue):
    cls = itertools.chain

    def __init__(self, iterables: list[Value]) -> None:
        self.iterables = iterables
        self.current: Value | None = None

    def advance(self, state: CaptureState) -> Value | None:
        while True:
            if self.current is None:
                if not self.iterables:
                    return None
                self.current = self.iterables.pop(0).iterate(state)
            item = self.current.advance(state)
            if item is not None:
                return item
            self.current = None

    def rebuild(self, writer: Any) -> str | None:
        current = [] if self.current is None else [self.current]
        return writer.made(self.cls, *current, *self.iterables)


class SliceIterator(IteratorValue):
    cls = itertools.islice

    def __init__(self, iterator: Value, start: int, stop: int | None, step: int) -> None:
        self.iterator = iterator
        self.next = start
        self.stop = stop
        self.step = step
        self.passed = 0

    def advance(self, state: CaptureState) -> Value | None:
        while self.passed < self.next:
            if self.iterator.advance(state) is None:
                return None
            self.passed += 1
        if self.stop is not None and self.passed >= self.stop:
            return None
        item = self.iterator.advance(state)
        self.passed += 1
        self.next += self.step
        if self.stop is not None:
            # Behind its last item a slice with steps still takes what lies before its end.
            self.next = min(self.next, self.stop)
        return item

    def rebuild(self, writer: Any) -> str | None:
        left = None if self.stop is None else self.stop - self.passed
        return writer.made(self.cls, self.iterator, self.next - self.passed, left, self.step)


@answer_to(zip)
def _zip(state: CaptureState, *iterables: Value, strict: Value | None = None) -> Any:
    items = [Items(state, iterable) for iterable in iterables]
    return RealIterator(zip(*items, strict=strict is not None and strict.truth(state)))


@answer_to(enumerate)
def _enumerate(state: CaptureState, iterable: Value, start: Value | None = None) -> Any:
    return RealIterator(enumerate(Items(state, iterable), 0 if start is None else start.as_constant()))


@answer_to(map)
def map_values(state: CaptureState, function: Value, *iterables: Value) -> Any:
    return RealIterator(map(Called(state, function), *(Items(state, iterable) for iterable in iterables)))


@answer_to(filter)
def filter_values(state: CaptureState, function: Value, iterable: Value) -> Any:
    return RealIterator(filter(predicate(state, function), Items(state, iterable)))


@answer_to(iter)
def _iter(state: CaptureState, iterable: Value, *sentinel: Value) -> Any:
    if not sentinel:
        return iterable.iterate(state)
    return RealIterator(iter(Called(state, iterable, StandIn), StandIn(state, *sentinel)))


@call_rule(itertools.count)
def _count(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    start, step = [argument.as_constant() for argument in args] + [0, 1][len(args) :]
    return CountIterator(start, step)


answer_to(itertools.chain)(lambda state, *iterables: ChainIterator(list(iterables)))
