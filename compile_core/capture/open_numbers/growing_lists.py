"""Lists that differ in length between calls, as those do that a program appends to."""

from __future__ import annotations

from gradsplit.compile_core.capture.values.base import CaptureState
from gradsplit.compile_core.capture.values.containers import Item, ListValue
from gradsplit.compile_core.ir.sources import Source


class GrowingList(ListValue):
    """An existing list that takes items at its end without being read; only who reads it guards its length."""

    def __init__(self, state: CaptureState, items: list[Item], source: Source) -> None:
        self._state = state
        self._before = items
        self._read: list[Item] | None = None
        # What was put after the items that were there, while these are not read.
        self.appended: list[Item] = []
        self.cls = list
        self.source: Source = source

    @property
    def is_read(self) -> bool:
        return self._read is not None

    @property
    def items(self) -> list[Item]:
        if self._read is None:
            self._state.guards.length(self.source, len(self._before))
            self._read = [*self._before, *self.appended]
        return self._read

    @items.setter
    def items(self, items: list[Item]) -> None:
        self._read = items

    def put(self, state: CaptureState, items: list[Item]) -> None:
        if self._read is not None:
            super().put(state, items)
            return
        self.before_change(state)
        self.appended += items
