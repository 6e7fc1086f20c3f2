"""Symbolic values as objects for Python's own code, as that of lists and of formatting, which then runs for real."""

from __future__ import annotations

from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue


class StandIn:
    """Stands for an object: it compares as the program does, and gives the text that the program would make."""

    def __init__(self, state: CaptureState, item: Value | LazyValue) -> None:
        self.state = state
        self.item = item

    @property
    def value(self) -> Value:
        """The object, which is read where this is asked."""
        self.item = self.state.realize(self.item)
        return self.item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.state.equal(self.value, other.value)

    __hash__ = object.__hash__  # a key of a dictionary that is only shown

    def __lt__(self, other: StandIn) -> bool:
        return self.state.less(self.value, other.value)

    def __str__(self) -> str:
        return str(self.state.text_of(self.value).as_constant())

    def __repr__(self) -> str:
        return str(self.state.representation_of(self.value).as_constant())

    def __format__(self, spec: str) -> str:
        return str(self.state.format_of(self.value, ConstantValue(spec)).as_constant())

    def __getattr__(self, name: str) -> object:
        raise self.state.unsupported("text", f"the attribute {name!r} of {self.value.describe()} in a text")

    def __getitem__(self, key: object) -> object:
        raise self.state.unsupported("text", f"an item of {self.value.describe()} in a text")

    def __index__(self) -> int:
        return self.state.as_index(self.value)

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def _number(self) -> float:
        real = self.value.as_constant() if isinstance(self.value, ConstantValue) else None
        if not isinstance(real, (int, float)):
            raise self.state.unsupported("text", f"{self.value.describe()} as a number in a text")
        return real
