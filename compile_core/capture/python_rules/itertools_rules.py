"""``itertools``: the real iterators, fed with symbolic values.

A real iterator of ``itertools`` asks its iterables and functions for objects in exactly the order in which Python
does; that these objects are symbolic values makes no difference to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gradsplit.compile_core.capture.operations import operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, IteratorValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.iterators import SliceIterator


class RealIterator(IteratorValue):
    """A real iterator over symbolic values, over tuples of them, or over iterators of them.

    ``is_closed`` says that nothing outside can change or see what it has left.
    """

    def __init__(self, iterator: Iterator[Any], is_closed: bool = False) -> None:
        self.iterator = iterator
        self.cls = type(iterator)
        self.is_closed = is_closed

    def rest(self) -> list[Value]:
        """All items that a closed iterator has left; it keeps them."""
        items = list(self.iterator)
        self.iterator = iter(items)
        return [_symbolic(item) for item in items]

    def advance(self, state: CaptureState) -> Value | None:
        try:
            return _symbolic(next(self.iterator))
        except StopIteration:
            return None


def _symbolic(item: Any) -> Value:
    if isinstance(item, Value):
        return item
    if isinstance(item, tuple):
        return SequenceValue([_symbolic(part) for part in item], tuple)
    if isinstance(item, _ByValue):
        return item.value
    return RealIterator(item)


class _Items:
    """A symbolic iterable as a real one."""

    def __init__(self, state: CaptureState, iterable: Value) -> None:
        self.state = state
        self.iterator = iterable.iterate(state)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Value:
        item = self.iterator.advance(self.state)
        if item is None:
            raise StopIteration
        return item


class _ByValue:
    """A symbolic value that compares as the program does."""

    def __init__(self, state: CaptureState, value: Value) -> None:
        self.state = state
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self.state.equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def _is_none(value: Value | None) -> bool:
    return value is None or is_none(value)


def _test(state: CaptureState, function: Value) -> Callable[[Value], bool]:
    """A predicate; None stands for the truth value itself."""
    if _is_none(function):
        return lambda item: item.truth(state)
    return lambda item: function.call(state, [item], {}).truth(state)


def _chosen(make: Any, state: CaptureState, function: Value, iterable: Value) -> Value:
    return RealIterator(make(_test(state, function), _Items(state, iterable)))


def _combined(make: Any, state: CaptureState, iterable: Value, *rest: Value, **named: Value) -> Value:
    length = [value.as_constant() for value in (*rest, *named.values())]
    return RealIterator(make(state.items_of(iterable), *length), is_closed=True)


def _over(make: Any, state: CaptureState, iterable: Value) -> Value:
    return RealIterator(make(_Items(state, iterable)))


for _make in (itertools.takewhile, itertools.dropwhile, itertools.filterfalse):
    answer_to(_make)(functools.partial(_chosen, _make))
for _make in (itertools.permutations, itertools.combinations, itertools.combinations_with_replacement):
    answer_to(_make)(functools.partial(_combined, _make))
for _make in (itertools.cycle, itertools.pairwise):
    answer_to(_make)(functools.partial(_over, _make))


@answer_to(itertools.product)
def _product(state: CaptureState, *iterables: Value, repeat: Value | None = None) -> Any:
    pools = [state.items_of(iterable) for iterable in iterables]
    times = 1 if repeat is None else repeat.as_constant()
    return RealIterator(itertools.product(*pools, repeat=times), is_closed=True)


@answer_to(itertools.islice)
def _islice(state: CaptureState, iterable: Value, *bounds: Value) -> Any:
    limits = slice(*(None if _is_none(bound) else state.as_index(bound, "islice limits") for bound in bounds))
    try:
        itertools.islice((), limits.start, limits.stop, limits.step)
    except ValueError as error:
        raise state.raise_exception(ValueError, str(error)) from None
    return SliceIterator(iterable.iterate(state), limits.start or 0, limits.stop, limits.step or 1)


@answer_to(itertools.repeat)
def _repeat(state: CaptureState, object: Value, times: Value | None = None) -> Any:
    count = [] if times is None else [times.as_constant()]
    return RealIterator(itertools.repeat(object, *count), is_closed=bool(count))


@answer_to(itertools.chain.from_iterable)
def _chain_from_iterable(state: CaptureState, *args: Value) -> Any:
    iterables = (_Items(state, iterable) for iterable in _Items(state, args[-1]))
    return RealIterator(itertools.chain.from_iterable(iterables))


@answer_to(itertools.compress)
def _compress(state: CaptureState, data: Value, selectors: Value) -> Any:
    truths = (item.truth(state) for item in _Items(state, selectors))
    return RealIterator(itertools.compress(_Items(state, data), truths))


@answer_to(itertools.accumulate)
def _accumulate(
    state: CaptureState, iterable: Value, func: Value | None = None, *, initial: Value | None = None
) -> Any:
    def combine(total: Value, item: Value) -> Value:
        if func is None or _is_none(func):
            return operators.binary(state, "+", total, item)
        return func.call(state, [total, item], {})

    start = None if _is_none(initial) else initial
    return RealIterator(itertools.accumulate(_Items(state, iterable), combine, initial=start))


@answer_to(itertools.starmap)
def _starmap(state: CaptureState, function: Value, iterable: Value) -> Any:
    tuples = ((state.items_of(item),) for item in _Items(state, iterable))
    return RealIterator(itertools.starmap(lambda items: function.call(state, items, {}), tuples))


@answer_to(itertools.zip_longest)
def _zip_longest(state: CaptureState, *args: Value, fillvalue: Value | None = None) -> Any:
    iterables = [_Items(state, argument) for argument in args]
    return RealIterator(itertools.zip_longest(*iterables, fillvalue=fillvalue or ConstantValue(None)))


@answer_to(itertools.groupby)
def _groupby(state: CaptureState, iterable: Value, key: Value | None = None) -> Any:
    def key_of(item: Value) -> _ByValue:
        return _ByValue(state, item if key is None or _is_none(key) else key.call(state, [item], {}))

    return RealIterator(itertools.groupby(_Items(state, iterable), key_of))


@answer_to(itertools.tee)
def _tee(state: CaptureState, iterable: Value, *count: Value) -> Any:
    copies = itertools.tee(_Items(state, iterable), *(number.as_constant() for number in count))
    return SequenceValue([RealIterator(copy) for copy in copies], tuple)
