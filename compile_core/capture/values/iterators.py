"""Iterators that compute their items one by one: zip, enumerate, map, filter and generators' kin."""

from __future__ import annotations

import itertools
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, answers, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, IteratorValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue


class ZipIterator(IteratorValue):
    cls = zip

    def __init__(self, iterators: list[Value], strict: bool) -> None:
        self.iterators = iterators
        self.strict = strict

    def advance(self, state: CaptureState) -> Value | None:
        items: list[Any] = []
        for position, iterator in enumerate(self.iterators):
            item = iterator.advance(state)
            if item is None:
                if self.strict:
                    self._check_end(state, position)
                return None
            items.append(item)
        return SequenceValue(items, tuple) if items else None

    def _check_end(self, state: CaptureState, ended: int) -> None:
        """The iterator at a position has ended: those before it gave an item more, those behind it must end too."""
        if ended:
            others = "argument 1" if ended == 1 else f"arguments 1-{ended}"
            text = f"zip() argument {ended + 1} is shorter than {others}"
            raise state.raise_exception(ValueError, text)
        for position, iterator in enumerate(self.iterators[1:], start=1):
            if iterator.advance(state) is not None:
                others = "argument 1" if position == 1 else f"arguments 1-{position}"
                text = f"zip() argument {position + 1} is longer than {others}"
                raise state.raise_exception(ValueError, text)


class EnumerateIterator(IteratorValue):
    cls = enumerate

    def __init__(self, iterator: Value, start: int) -> None:
        self.iterator = iterator
        self.index = start

    def advance(self, state: CaptureState) -> Value | None:
        item = self.iterator.advance(state)
        if item is None:
            return None
        self.index += 1
        return SequenceValue([ConstantValue(self.index - 1), item], tuple)


class MapIterator(IteratorValue):
    cls = map

    def __init__(self, function: Value, iterators: list[Value]) -> None:
        self.function = function
        self.iterators = iterators

    def advance(self, state: CaptureState) -> Value | None:
        items = []
        for iterator in self.iterators:
            item = iterator.advance(state)
            if item is None:
                return None
            items.append(item)
        return self.function.call(state, items, {})


class FilterIterator(IteratorValue):
    cls = filter

    def __init__(self, function: Value, iterator: Value) -> None:
        self.function = function
        self.iterator = iterator

    def advance(self, state: CaptureState) -> Value | None:
        while (item := self.iterator.advance(state)) is not None:
            kept = item
            if not is_none(self.function):
                kept = self.function.call(state, [item], {})
            if kept.truth(state):
                return item
        return None


class CountIterator(IteratorValue):
    cls = itertools.count

    def __init__(self, value: Any, step: Any) -> None:
        self.value = value
        self.step = step

    def advance(self, state: CaptureState) -> Value | None:
        value = self.value
        self.value = value + self.step
        return ConstantValue(value)


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


@answer_to(zip)
def _zip(state: CaptureState, *iterables: Value, strict: Value | None = None) -> Any:
    iterators = [iterable.iterate(state) for iterable in iterables]
    return ZipIterator(iterators, strict is not None and strict.truth(state))


@answer_to(enumerate)
def _enumerate(state: CaptureState, iterable: Value, start: Value | None = None) -> Any:
    return EnumerateIterator(iterable.iterate(state), 0 if start is None else start.as_constant())


answers(
    {
        map: lambda state, function, *iterables: MapIterator(
            function, [iterable.iterate(state) for iterable in iterables]
        ),
        filter: lambda state, function, iterable: FilterIterator(function, iterable.iterate(state)),
    }
)


@call_rule(itertools.count)
def _count(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    start, step = [argument.as_constant() for argument in args] + [0, 1][len(args) :]
    return CountIterator(start, step)


answer_to(itertools.chain)(lambda state, *iterables: ChainIterator(list(iterables)))
