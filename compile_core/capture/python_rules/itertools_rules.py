"""``itertools``: the real iterators, fed with symbolic values."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from gradsplit.compile_core.capture.operations import operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.iterators import Items, RealIterator, SliceIterator, predicate
from gradsplit.compile_core.capture.values.stand_ins import StandIn


def _is_none(value: Value | None) -> bool:
    return value is None or is_none(value)


def _chosen(make: Any, state: CaptureState, function: Value, iterable: Value) -> Value:
    return RealIterator(make(predicate(state, function), Items(state, iterable)))


def _combined(make: Any, state: CaptureState, iterable: Value, *rest: Value, **named: Value) -> Value:
    length = [value.as_constant() for value in (*rest, *named.values())]
    return RealIterator(make(state.items_of(iterable), *length), is_closed=True)


def _over(make: Any, state: CaptureState, iterable: Value) -> Value:
    return RealIterator(make(Items(state, iterable)))


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
    limits = slice(*(None if _is_none(bound) else state.as_index(bound) for bound in bounds))
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
    iterables = (Items(state, iterable) for iterable in Items(state, args[-1]))
    return RealIterator(itertools.chain.from_iterable(iterables))


@answer_to(itertools.compress)
def _compress(state: CaptureState, data: Value, selectors: Value) -> Any:
    truths = (item.truth(state) for item in Items(state, selectors))
    return RealIterator(itertools.compress(Items(state, data), truths))


@answer_to(itertools.accumulate)
def _accumulate(
    state: CaptureState, iterable: Value, func: Value | None = None, *, initial: Value | None = None
) -> Any:
    def combine(total: Value, item: Value) -> Value:
        if func is None or _is_none(func):
            return operators.binary(state, "+", total, item)
        return func.call(state, [total, item], {})

    start = None if _is_none(initial) else initial
    return RealIterator(itertools.accumulate(Items(state, iterable), combine, initial=start))


@answer_to(itertools.starmap)
def _starmap(state: CaptureState, function: Value, iterable: Value) -> Any:
    tuples = ((state.items_of(item),) for item in Items(state, iterable))
    return RealIterator(itertools.starmap(lambda items: function.call(state, items, {}), tuples))


@answer_to(itertools.zip_longest)
def _zip_longest(state: CaptureState, *args: Value, fillvalue: Value | None = None) -> Any:
    iterables = [Items(state, argument) for argument in args]
    return RealIterator(itertools.zip_longest(*iterables, fillvalue=fillvalue or ConstantValue(None)))


@answer_to(itertools.groupby)
def _groupby(state: CaptureState, iterable: Value, key: Value | None = None) -> Any:
    def key_of(item: Value) -> StandIn:
        return StandIn(state, item if key is None or _is_none(key) else key.call(state, [item], {}))

    return RealIterator(itertools.groupby(Items(state, iterable), key_of))


@answer_to(itertools.tee)
def _tee(state: CaptureState, iterable: Value, *count: Value) -> Any:
    copies = itertools.tee(Items(state, iterable), *(number.as_constant() for number in count))
    return SequenceValue([RealIterator(copy) for copy in copies], tuple)
