"""Existing objects without rules: they are passed on, and everything else done with them ends the graph."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.sources import Source


class OpaqueValue(Value):
    """An object that is known by its type and by where it lies. ``reason`` says why it has no rules.

    It may be another object at the next call, so nothing but its type may be relied on.
    """

    def __init__(self, real: Any, source: Source, reason: Unsupported | None) -> None:
        self.real = real
        self.source: Source = source
        self.reason = reason

    def python_type(self) -> type:
        return type(self.real)

    def describe(self) -> str:
        return f"{self.source}, an object of type {type(self.real).__qualname__}"

    def hash_key(self, state: CaptureState) -> Any:
        """The object itself, which must then be the same at every call."""
        if type(self.real).__hash__ is not object.__hash__:
            raise self._refuse(state)
        state.guards.is_object(self.source, self.real)
        return self.real

    def refuse_argument(self, state: CaptureState, callee: str) -> Unsupported:
        return super().refuse_argument(state, callee) if self.reason is None else self._refuse(state)

    def _refuse(self, state: CaptureState) -> Unsupported:
        if self.reason is not None:
            return Unsupported(
                self.reason.reason_id, self.reason.explanation, self.reason.hint, state.location()
            )
        return state.unsupported("opaque-object", f"no rule for what is done with {self.describe()}")

    def _refused(self, state: CaptureState, *args: Any) -> Any:
        raise self._refuse(state)


for _name in (
    *("truth", "get_attribute", "set_attribute", "delete_attribute", "call", "iterate", "advance", "length"),
    *("get_item", "set_item", "delete_item", "contains", "graph_argument"),
):
    setattr(OpaqueValue, _name, OpaqueValue._refused)


def wrap_opaque(state: CaptureState, real: Any, source: Source, reason: Unsupported | None) -> Value:
    """The one opaque value of an object."""
    state.guards.type_is(source, type(real))
    found = state.known.get(id(real))
    if found is not None:
        value = found[1]
        state.guards.same(value.source, source)
        return value
    value = OpaqueValue(real, source, reason)
    state.known[id(real)] = (real, value)
    return value


class ChangingText(OpaqueValue):
    """A string that was another one in an earlier call.

    What decides which way the program goes is guarded, such as the name of a mode. Everything else is refused: what
    is made of a text that a number was written into would be captured in each call.
    """

    def settle(self, state: CaptureState) -> ConstantValue:
        """The string itself, which must then be the same at every call."""
        state.guards.constant(self.source, self.real)
        return ConstantValue(self.real)

    def hash_key(self, state: CaptureState) -> Any:
        return self.settle(state).hash_key(state)

    def truth(self, state: CaptureState) -> bool:
        return self.settle(state).truth(state)
