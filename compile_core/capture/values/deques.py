"""``collections.deque``: a list that grows at both ends, and may have a maximal length."""

from __future__ import annotations

import collections
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import Item, ListValue, WatchingIterator

_ITERATOR = type(iter(collections.deque()))


class DequeValue(ListValue):
    """A deque."""

    def __init__(self, items: list[Item], limit: int | None, source: Any = None) -> None:
        super().__init__(items, source)
        self.cls = collections.deque
        self.limit = limit

    def replace(self, state: CaptureState, items: list[Item], keep_end: bool = True) -> None:
        """Set the items; of too many, those at the end (or at the start) stay."""
        if self.limit is not None and len(items) > self.limit:
            items = items[len(items) - self.limit :] if keep_end else items[: self.limit]
        super().replace(state, items)

    def put(self, state: CaptureState, items: list[Item]) -> None:
        if self.limit is None:
            super().put(state, items)
        else:
            self.replace(state, [*self.items, *items])

    def as_constant(self) -> Any:
        return super(ListValue, self).as_constant()

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

    def do_appendleft(self, state: CaptureState, item: Value) -> None:
        self.replace(state, [item, *self.items], keep_end=False)

    def do_extendleft(self, state: CaptureState, items: Value) -> None:
        self.replace(state, [*reversed(state.items_of(items)), *self.items], keep_end=False)

    def do_pop(self, state: CaptureState) -> Value:
        return self._end(state, -1)

    def do_popleft(self, state: CaptureState) -> Value:
        return self._end(state, 0)

    def _end(self, state: CaptureState, index: int) -> Value:
        if not self.items:
            raise state.raise_exception(IndexError, "pop from an empty deque")
        items = list(self.items)
        item = state.realize(items.pop(index))
        self.replace(state, items)
        return item

    def do_rotate(self, state: CaptureState, steps: Value | None = None) -> None:
        turned = collections.deque(self.items)
        turned.rotate(1 if steps is None else steps.as_constant())
        self.replace(state, list(turned))

    def do_insert(self, state: CaptureState, index: Value, item: Value) -> None:
        if self.limit is not None and len(self.items) >= self.limit:
            raise state.raise_exception(IndexError, "deque already at its maximum size")
        super().do_insert(state, index, item)

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
