"""Nested tuples, lists and dictionaries whose parts are tensors and the like: what goes into calls and comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue, new_dict


def map_parts(state: CaptureState, value: Value, change: Callable[[Value], Value]) -> Value:
    """A copy of a value with what ``change`` makes of every part that is no tuple, list or plain dictionary."""
    if isinstance(value, SequenceValue):
        items: list[Any] = [map_parts(state, item, change) for item in value.all(state)]
        return ListValue(items) if value.cls is list else SequenceValue(items, value.cls)
    if isinstance(value, DictValue) and value.cls is dict:
        return new_dict([(key, map_parts(state, item, change)) for key, item in value.pairs(state)], state)
    return change(value)


def leaves(state: CaptureState, values: Iterable[Value]) -> Iterator[Value]:
    """The values, and in the place of tuples and lists what these consist of."""
    for value in values:
        if isinstance(value, SequenceValue) and value.cls in (tuple, list):
            yield from leaves(state, value.all(state))
        else:
            yield value
