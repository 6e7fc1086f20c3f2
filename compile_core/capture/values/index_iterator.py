"""The iterator that Python makes of an object that has ``__getitem__`` and no ``__iter__``."""

from __future__ import annotations

from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, IteratorValue


class _Indexed:
    def __getitem__(self, index: int) -> int:
        return index


class IndexIterator(IteratorValue):
    """The iterator over an object that has only ``__getitem__``: 0, 1, 2 … until IndexError."""

    cls = type(iter(_Indexed()))

    def __init__(self, owner: Value) -> None:
        self.owner = owner
        self.index: int | None = 0

    def advance(self, state: CaptureState) -> Value | None:
        if self.index is None:
            return None
        try:
            item = self.owner.get_item(state, ConstantValue(self.index))
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), (IndexError, StopIteration)):
                raise
            self.index = None
            return None
        self.index += 1
        return item
