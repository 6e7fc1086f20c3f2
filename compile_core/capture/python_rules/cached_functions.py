"""``functools.lru_cache``: a cached function of known arguments is called for real, once.

Until the cache is cleared, later calls of the compiled function skip the call, as the cache makes the plain program
skip its body; the result is the object in the cache, so its identity is kept too. What the body does besides (a
warning that is to be given only once) happens when the plain program would do it first.
"""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_literal
from gradsplit.compile_core.capture.values.references import ReferenceValue


class CachedFunctionValue(ReferenceValue):
    """The object that ``lru_cache`` makes of a function."""

    def describe(self) -> str:
        return f"the cached function {self.real.__qualname__}"

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        rule = CALL_RULES.get(self.real)
        if rule is not None:
            return rule(state, args, kwargs)
        real_args = [self._known(state, argument) for argument in args]
        real_kwargs = {name: self._known(state, argument) for name, argument in kwargs.items()}
        try:
            result = self.real(*real_args, **real_kwargs)
        except Exception as error:
            raise state.raise_exception(type(error), *error.args) from None
        self._guard_cache(state)
        if is_literal(result):
            return ConstantValue(result)
        return state.wrap(result, state.reference_source(f"{self.real.__name__}_result", result))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return state.from_constant(getattr(self.real, name))
        if name == "__wrapped__":
            return state.wrap(self.real.__wrapped__, state.reference_source(name, self.real.__wrapped__))
        return super().get_attribute(state, name)

    def _guard_cache(self, state: CaptureState) -> None:
        """Notices ``cache_clear()``, which sets the counts to zero."""
        source = self.source or state.reference_source(self.real.__name__, self.real)
        condition = f"{{0}}.cache_info().misses >= {self.real.cache_info().misses}"
        state.guards.add([source], condition, [], f"the cache of {source} was not cleared")

    def _known(self, state: CaptureState, argument: Value) -> Any:
        """The argument itself: a constant, or an object that the cache finds by its identity."""
        if isinstance(argument, (InstanceValue, ReferenceValue)):
            real = argument.real
            by_identity = type(real).__hash__ in (object.__hash__, type.__hash__)
            if real is not None and by_identity and not getattr(argument, "changes", None):
                if argument.source is not None:
                    state.guards.is_object(argument.source, real)
                return real
        try:
            return argument.as_constant()
        except NotConstant:
            shown = f"{self.describe()} with {argument.describe()} as an argument"
            raise state.unsupported("cached-call", shown, "cache on plain values") from None
