"""Context variables: what one is set to is guarded where it is read, and set once the graph has run.

A token that is still needed when the graph ends cannot be made there: the graph ends before it was made.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, MethodOwner
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import ConvertedSource, Reference

_UNSET = object()
_HELD = Reference("held", lambda variable: variable.get(_UNSET))
_DEFAULT = Reference("default", ContextVar.get)


class _MadeToken(Value):
    """What a variable is given back by, once: ``before`` is what it held."""

    cls = Token

    def __init__(self, variable: ContextVariable, before: Value | None) -> None:
        self.variable: ContextVariable | None = variable
        self.before = before


class ContextVariable(MethodOwner, ReferenceValue):
    """An existing variable; ``_given`` is what the frame has set and not reset."""

    _given: Value | None = None

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        return ConstantValue(self.real.name) if name == "name" else super().get_attribute(state, name)

    def do_get(self, state: CaptureState, *default: Value) -> Value:
        if self._given is not None:
            return self._given
        self.source = self.source or state.reference_source(self.real.name, self.real)
        place = ConvertedSource(self.source, _HELD)
        found = self.real.get(_UNSET)
        if found is not _UNSET:
            return state.wrap(found, place)
        state.guards.is_object(place, _UNSET)
        try:
            held = ConvertedSource(self.source, _DEFAULT)
            return default[0] if default else state.wrap(self.real.get(), held)
        except LookupError:
            raise state.raise_exception(LookupError, self) from None

    def do_set(self, state: CaptureState, value: Value) -> Value:
        made = _MadeToken(self, self._given)
        self._give(state, value)
        return made

    def do_reset(self, state: CaptureState, token: Value) -> None:
        if not isinstance(token, _MadeToken) or token.variable is not self:
            raise state.unsupported("context-variable", f"{self.describe()} is given {token.describe()}")
        token.variable = None
        self._give(state, token.before)

    def _give(self, state: CaptureState, value: Value | None) -> None:
        self._given = value
        self.source = self.source or state.reference_source(self.real.name, self.real)
        state.effects.moved_on(self)
        if value is None:
            del state.effects.moved[id(self)]

    def move(self, writer: Any) -> str:
        return f"{writer.emit(self)}.set({writer.emit(self._given)})"
