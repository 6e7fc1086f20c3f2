"""``functools.partial``."""

from __future__ import annotations

import functools
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue, new_dict
from gradsplit.compile_core.ir.sources import Source


class PartialValue(Value):
    """A function with the first of its arguments."""

    cls = functools.partial

    def __init__(
        self, function: Value, args: SequenceValue, kwargs: DictValue, source: Source | None = None
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.source = source
        self.changes: dict[str, Value] = {}

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        parts: dict[str, Value] = {"func": self.function, "args": self.args, "keywords": self.kwargs}
        if name in parts:
            return parts[name]
        if name in self.changes:
            return self.changes[name]
        if not hasattr(functools.partial, name):
            message = f"'functools.partial' object has no attribute {name!r}"
            raise state.raise_exception(AttributeError, message)
        return super().get_attribute(state, name)

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if self.source is not None or name in ("func", "args", "keywords", "__dict__"):
            raise state.unsupported("attribute-store", f"a store to {name!r} of a partial application")
        self.changes[name] = value

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(
            functools.partial, self.function, *self.args.items, **self.kwargs.held(writer.state)
        )

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self.function.call(
            state, [*self.args.all(state), *args], {**self.kwargs.held(state), **kwargs}
        )


@call_rule(functools.partial)
def _partial(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, *bound = args
    if isinstance(function, PartialValue):
        # A partial application of a partial application is one of the function.
        bound = [*function.args.all(state), *bound]
        kwargs = {**function.kwargs.held(state), **kwargs}
        function = function.function
    pairs: list[tuple[Value, Value]] = [(ConstantValue(name), value) for name, value in kwargs.items()]
    return PartialValue(function, SequenceValue(list(bound), tuple), new_dict(pairs, state))
