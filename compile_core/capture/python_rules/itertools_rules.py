"""``itertools``: the real iterators, fed with symbolic values.

A real iterator of ``itertools`` asks its iterables and functions for objects in exactly the order in which Python
does; that these objects are symbolic values makes no difference to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gradsplit.compile_core.capture.operations import operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.iterators import IteratorValue, SliceIterator


class RealIterator(IteratorValue):
    """A real iterator over symbolic values, over tuples of them, or over iterators of them.

    ``is_closed`` says that nothing outside can change or see what it has left.
    """

    def __init__(self, iterator: Iterator[Any], cls: type, is_closed: bool = False) -> None:
        self.iterator = iterator
        self.cls = cls
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
    return RealIterator(item, type(item))


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


def _predicate_rule(make: Any) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        function, iterable = args
        return RealIterator(make(_test(state, function), _Items(state, iterable)), make)

    return call


for _make in (itertools.takewhile, itertools.dropwhile, itertools.filterfalse):
    CALL_RULES[_make] = _predicate_rule(_make)


def _combination_rule(make: Any) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        iterable, *rest = [*args, *kwargs.values()]
        length = [value.as_constant() for value in rest]
        return RealIterator(make(state.items_of(iterable), *length), make, is_closed=True)

    return call


for _make in (itertools.permutations, itertools.combinations, itertools.combinations_with_replacement):
    CALL_RULES[_make] = _combination_rule(_make)


@call_rule(itertools.product)
def _product(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    repeat = kwargs.pop("repeat", ConstantValue(1)).as_constant()
    if kwargs:
        raise TypeError("product() takes only repeat by name")
    pools = [state.items_of(argument) for argument in args]
    return RealIterator(itertools.product(*pools, repeat=repeat), itertools.product, is_closed=True)


@call_rule(itertools.islice)
def _islice(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    iterable, *bounds = args
    limits = slice(*(None if _is_none(bound) else state.as_index(bound, "islice limits") for bound in bounds))
    try:
        itertools.islice((), limits.start, limits.stop, limits.step)
    except ValueError as error:
        raise state.raise_exception(ValueError, str(error)) from None
    return SliceIterator(iterable.iterate(state), limits.start or 0, limits.stop, limits.step or 1)


@call_rule(itertools.repeat)
def _repeat(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def make(item: Value, times: Value | None = None) -> Value:
        count = [] if times is None else [times.as_constant()]
        return RealIterator(itertools.repeat(item, *count), itertools.repeat, is_closed=bool(count))

    return make(*args, **{{"object": "item"}.get(name, name): value for name, value in kwargs.items()})


@call_rule(itertools.cycle)
def _cycle(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (iterable,) = args
    return RealIterator(itertools.cycle(_Items(state, iterable)), itertools.cycle)


@call_rule(itertools.chain.from_iterable)
def _chain_from_iterable(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    iterables = (_Items(state, iterable) for iterable in _Items(state, args[-1]))
    return RealIterator(itertools.chain.from_iterable(iterables), itertools.chain)


@call_rule(itertools.compress)
def _compress(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def make(data: Value, selectors: Value) -> Value:
        truths = (item.truth(state) for item in _Items(state, selectors))
        return RealIterator(itertools.compress(_Items(state, data), truths), itertools.compress)

    return make(*args, **kwargs)


@call_rule(itertools.accumulate)
def _accumulate(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def make(iterable: Value, func: Value | None = None, *, initial: Value | None = None) -> Value:
        def combine(total: Value, item: Value) -> Value:
            if func is None or _is_none(func):
                return operators.binary(state, "+", total, item)
            return func.call(state, [total, item], {})

        start = None if _is_none(initial) else initial
        real = itertools.accumulate(_Items(state, iterable), combine, initial=start)
        return RealIterator(real, itertools.accumulate)

    return make(*args, **kwargs)


@call_rule(itertools.pairwise)
def _pairwise(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (iterable,) = args
    return RealIterator(itertools.pairwise(_Items(state, iterable)), itertools.pairwise)


@call_rule(itertools.starmap)
def _starmap(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, iterable = args
    tuples = ((state.items_of(item),) for item in _Items(state, iterable))
    real = itertools.starmap(lambda items: function.call(state, items, {}), tuples)
    return RealIterator(real, itertools.starmap)


@call_rule(itertools.zip_longest)
def _zip_longest(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    fill = kwargs.pop("fillvalue", ConstantValue(None))
    if kwargs:
        raise TypeError("zip_longest() takes only fillvalue by name")
    iterables = [_Items(state, argument) for argument in args]
    return RealIterator(itertools.zip_longest(*iterables, fillvalue=fill), itertools.zip_longest)


@call_rule(itertools.groupby)
def _groupby(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def make(iterable: Value, key: Value | None = None) -> Value:
        def key_of(item: Value) -> _ByValue:
            return _ByValue(state, item if key is None or _is_none(key) else key.call(state, [item], {}))

        return RealIterator(itertools.groupby(_Items(state, iterable), key_of), itertools.groupby)

    return make(*args, **kwargs)


@call_rule(itertools.tee)
def _tee(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    iterable, *count = args
    copies = itertools.tee(_Items(state, iterable), *(number.as_constant() for number in count))
    return SequenceValue([RealIterator(copy, type(copy)) for copy in copies], tuple)
