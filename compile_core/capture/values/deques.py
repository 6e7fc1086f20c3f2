"""``collections.deque``: a list that grows at both ends, and may have a maximal length."""

from __future__ import annotations

import collections
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import Item, ListValue, WatchingIterator, python_method

_ITERATOR = type(iter(collections.deque()))


class DequeValue(ListValue):
    """A deque."""

    def __init__(self, items: list[Item], limit: int | None, source: Any = None) -> None:
        super().__init__(items, source)
        self.cls = collections.deque
        self.limit = limit

    do_appendleft, do_popleft, do_rotate = map(python_method, ("appendleft", "popleft", "rotate"))

    def python_object(self, items: list[Any]) -> Any:
        return collections.deque(items, self.limit)

    def put(self, state: CaptureState, items: list[Item]) -> None:
        self.in_python(state, "extend", items)

    def graph_argument(self, state: CaptureState) -> Any:
        return Value.graph_argument(self, state)

    def iterate(self, state: CaptureState) -> Value:
        return _DequeIterator(self, list(self.items), _ITERATOR)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        real = key.as_constant() if isinstance(key, ConstantValue) else None
        if not isinstance(real, int):
            raise state.raise_exception(TypeError, "sequence index must be integer, not 'slice'")
        return super().get_item(state, key)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "maxlen":
            return ConstantValue(self.limit)
        return super().get_attribute(state, name)

    def do_extendleft(self, state: CaptureState, items: Value) -> None:
        self.in_python(state, "extendleft", state.items_of(items))

    def do_copy(self, state: CaptureState) -> Value:
        return DequeValue(list(self.all(state)), self.limit)

    do___copy__ = do_copy


class _DequeIterator(WatchingIterator):
    text = "deque mutated during iteration"


@answer_to(collections.deque)
def _deque(state: CaptureState, iterable: Value | None = None, maxlen: Value | None = None) -> Any:
    limit = None if maxlen is None else maxlen.as_constant()
    made = DequeValue([], limit)
    if iterable is not None:
        made.do_extend(state, iterable)
    return made
