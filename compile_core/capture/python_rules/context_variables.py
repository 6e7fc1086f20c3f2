"""Context variables: what one is set to is guarded where it is read, and set once the graph has run.

A token that is still needed when the graph ends cannot be made there: the graph ends before it was made.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue
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


class ContextVariable(ReferenceValue):
    """An existing variable; ``_given`` is what the frame has set and not reset."""

    _given: Value | None = None

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "name":
            return ConstantValue(self.real.name)
        return (
            BuiltinMethod(self, name)
            if name in ("get", "set", "reset")
            else super().get_attribute(state, name)
        )

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        self.source = self.source or state.reference_source(self.real.name, self.real)
        if name == "get" and not kwargs and len(args) <= 1:
            return self._given or self._held(state, args)
        if name == "set" and not kwargs and len(args) == 1:
            made = _MadeToken(self, self._given)
            self._give(state, args[0])
            return made
        (token,) = args or (self,)
        if name != "reset" or not isinstance(token, _MadeToken) or token.variable is not self:
            shown = ", ".join(argument.describe() for argument in args)
            raise state.unsupported("context-variable", f"{name!r} of {self.describe()} with ({shown})")
        token.variable = None
        self._give(state, token.before)
        return ConstantValue(None)

    def _give(self, state: CaptureState, value: Value | None) -> None:
        self._given = value
        state.effects.moved_on(self)
        if value is None:
            del state.effects.moved[id(self)]

    def _held(self, state: CaptureState, default: list[Value]) -> Value:
        assert self.source is not None
        place = ConvertedSource(self.source, _HELD)
        found = self.real.get(_UNSET)
        if found is not _UNSET:
            return state.wrap(found, place)
        state.guards.is_object(place, _UNSET)
        try:
            return (
                default[0] if default else state.wrap(self.real.get(), ConvertedSource(self.source, _DEFAULT))
            )
        except LookupError:
            raise state.raise_exception(LookupError, self) from None

    def move(self, writer: Any) -> str:
        return f"{writer.emit(self)}.set({writer.emit(self._given)})"
