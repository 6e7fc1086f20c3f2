"""Python functions, their closure cells, bound methods and partial applications."""

from __future__ import annotations

import functools
import types
from typing import Any

from compile_core.capture.base import CaptureState, LazyValue, Value
from compile_core.capture.constants import ConstantValue
from compile_core.capture.directives import DISABLED_BECAUSE, is_disabled
from compile_core.capture.libraries import is_library_name
from compile_core.ir.sources import AttributeSource, ItemSource, Source


class CellValue(Value):
    """A closure cell: one variable that several functions share. ``content`` is None while it is empty.

    ``source`` is where an existing cell itself is found.
    """

    def __init__(
        self,
        content: Value | LazyValue | None,
        real: types.CellType | None = None,
        source: Source | None = None,
    ) -> None:
        self.content = content
        self.real = real
        self.source = source

    def python_type(self) -> type:
        return types.CellType

    def store(self, state: CaptureState, value: Value | None) -> None:
        self.content = value
        if self.real is not None and self.source is None:
            raise state.unsupported("library-state", "a store to a closure variable of a library")
        state.effects.cell_changed(self)


class FunctionValue(Value):
    """A Python function, existing or made in the frame."""

    def __init__(
        self,
        code: types.CodeType,
        scope: dict[str, Any],
        closure: tuple[CellValue, ...],
        defaults: list[Value],
        keyword_defaults: dict[str, Value],
        real: types.FunctionType | None = None,
        source: Source | None = None,
        name: str = "",
    ) -> None:
        self.code = code
        self.scope = scope
        self.closure = closure
        self.defaults = defaults
        self.keyword_defaults = keyword_defaults
        self.real = real
        self.source = source
        self.name = name or code.co_name
        self.attributes: dict[str, Value] = {}

    def python_type(self) -> type:
        return types.FunctionType

    def describe(self) -> str:
        return f"the function {self.name}"

    @property
    def is_library(self) -> bool:
        return is_library_name(self.scope.get("__name__"))

    def truth(self, state: CaptureState) -> bool:
        return True

    def hash_key(self, state: CaptureState) -> Any:
        return self.real if self.real is not None else self

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if is_disabled(self.real):
            because = getattr(self.real, DISABLED_BECAUSE, None)
            reason = f"{self.describe()} is excluded from compilation"
            raise state.unsupported("disabled", f"{reason}: {because}" if because else reason)
        return state.inline(self, args, kwargs)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in self.attributes:
            return self.attributes[name]
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            if self.real is not None:
                return state.from_constant(getattr(self.real, name))
            if name in ("__name__", "__qualname__"):
                return ConstantValue(self.name)
        if name == "__code__":
            return ConstantValue(self.code)
        if self.real is not None:
            if name in self.real.__dict__:
                owner = self.source
                found = None if owner is None else ItemSource(AttributeSource(owner, "__dict__"), name)
                if owner is not None or self.is_library:
                    return state.wrap(self.real.__dict__[name], found)
            elif not hasattr(types.FunctionType, name):
                if self.source is not None:
                    state.guards.absent(AttributeSource(self.source, "__dict__"), name)
                raise state.raise_exception(AttributeError, f"'function' object has no attribute {name!r}")
        return super().get_attribute(state, name)

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if self.real is not None:
            raise state.unsupported("function-attribute", f"a store to {name!r} of an existing function")
        self.attributes[name] = value


class BoundMethodValue(Value):
    """A function bound to its first argument."""

    def __init__(self, function: Value, owner: Value) -> None:
        self.function = function
        self.owner = owner

    def python_type(self) -> type:
        return types.MethodType

    def describe(self) -> str:
        return f"{self.function.describe()}, a method of {self.owner.describe()}"

    def truth(self, state: CaptureState) -> bool:
        return True

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self.function.call(state, [self.owner, *args], kwargs)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "__self__":
            return self.owner
        if name == "__func__":
            return self.function
        return self.function.get_attribute(state, name)


class PartialValue(Value):
    """``functools.partial``."""

    def __init__(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def python_type(self) -> type:
        return functools.partial

    def truth(self, state: CaptureState) -> bool:
        return True

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self.function.call(state, [*self.args, *args], {**self.kwargs, **kwargs})
