"""``collections.deque``: a list that grows at both ends, and may have a maximal length."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, SequenceIterator, fold
from gradsplit.compile_core.capture.values.containers import Item, ListValue
from gradsplit.compile_core.errors import InternalError

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
        return DequeIterator(self, list(self.items))

    def get_item(self, state: CaptureState, key: Value) -> Value:
        real = key.as_constant() if isinstance(key, ConstantValue) else None
        if not isinstance(real, int):
            raise state.raise_exception(TypeError, "sequence index must be integer, not 'slice'")
        return super().get_item(state, key)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "maxlen":
            return ConstantValue(self.limit)
        return super().get_attribute(state, name)

    def append_left(self, state: CaptureState, item: Value) -> Value:
        self.replace(state, [item, *self.items], keep_end=False)
        return ConstantValue(None)

    def extend_left(self, state: CaptureState, items: Value) -> Value:
        self.replace(state, [*reversed(state.items_of(items)), *self.items], keep_end=False)
        return ConstantValue(None)

    def _end(self, state: CaptureState, index: int) -> Value:
        if not self.items:
            raise state.raise_exception(IndexError, "pop from an empty deque")
        items = list(self.items)
        item = state.realize(items.pop(index))
        self.replace(state, items)
        return item

    def rotate(self, state: CaptureState, steps: Value | None = None) -> Value:
        turned = collections.deque(self.items)
        turned.rotate(1 if steps is None else steps.as_constant())
        self.replace(state, list(turned))
        return ConstantValue(None)

    def insert(self, state: CaptureState, index: Value, item: Value) -> Value:
        if self.limit is not None and len(self.items) >= self.limit:
            raise state.raise_exception(IndexError, "deque already at its maximum size")
        return super().insert(state, index, item)

    def remove(self, state: CaptureState, item: Value) -> Value:
        for position, member in enumerate(self.all(state)):
            if state.equal(member, item):
                self.delete_item(state, ConstantValue(position))
                return ConstantValue(None)
        empty: collections.deque[Any] = collections.deque()
        fold(state, empty.remove, [item], {})  # raises, in the words of this version of Python
        raise InternalError("an empty deque had an item")

    def index(self, state: CaptureState, item: Value, *limits: Value) -> Value:
        start, stop, _ = slice(*([None, None] if not limits else _bounds(limits))).indices(len(self.items))
        for position in range(start, stop):
            if state.equal(self.get(state, position), item):
                return ConstantValue(position)
        raise state.raise_exception(
            ValueError, f"{state.representation_of(item).as_constant()} is not in deque"
        )

    def copy(self, state: CaptureState) -> Value:
        return DequeValue(list(self.all(state)), self.limit)

    methods: ClassVar = {
        **{name: method for name, method in ListValue.methods.items() if name != "sort"},
        "appendleft": append_left,
        "extendleft": extend_left,
        "pop": lambda self, state: self._end(state, -1),
        "popleft": lambda self, state: self._end(state, 0),
        "rotate": rotate,
        "insert": insert,
        "remove": remove,
        "index": index,
        "copy": copy,
        "__copy__": copy,
    }


def _bounds(limits: tuple[Value, ...]) -> list[Any]:
    return [*(limit.as_constant() for limit in limits), None][:2]


class DequeIterator(SequenceIterator):
    """An iterator over a deque, which must not be changed meanwhile."""

    def __init__(self, owner: DequeValue, items: list[Item]) -> None:
        super().__init__(items, _ITERATOR)
        self.owner = owner
        self.before = list(owner.items)

    def advance(self, state: CaptureState) -> Value | None:
        if self.items and len(self.owner.items) != len(self.before):
            raise state.raise_exception(RuntimeError, "deque mutated during iteration")
        return super().advance(state)


@answer_to(collections.deque)
def _deque(state: CaptureState, iterable: Value | None = None, maxlen: Value | None = None) -> Any:
    limit = None if maxlen is None else maxlen.as_constant()
    made = DequeValue([], limit)
    if iterable is not None:
        made.extend(state, iterable)
    return made
