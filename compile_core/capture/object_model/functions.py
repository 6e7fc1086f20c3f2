"""Python functions, their closure cells, and bound methods."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from gradsplit.compile_core.capture.directives import DISABLED_BECAUSE, is_disabled
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING, AttributeOwner
from gradsplit.compile_core.capture.object_model.libraries import is_library_name
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, MethodOwner, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.ir.sources import AttributeSource, Source


@dataclass(eq=False, repr=False)
class CellValue(Value):
    """A closure cell: one variable that several functions share. ``content`` is None while it is empty.

    ``source`` is where an existing cell itself is found.
    """

    cls = types.CellType

    content: Value | LazyValue | None
    real: types.CellType | None = None
    source: Source | None = None

    def store(self, state: CaptureState, value: Value | None) -> None:
        self.content = value
        if self.real is not None and self.source is None:
            raise state.unsupported("library-state", "a store to a closure variable of a library")
        state.effects.cell_changed(self)


def bind_function(function: Value, state: CaptureState, owner: Value, cls: Value | None = None) -> Value:
    """``function.__get__(owner, cls=None)``."""
    if not is_none(owner):
        return BoundMethodValue(function, owner)
    if cls is None or is_none(cls):
        raise state.raise_exception(TypeError, "__get__(None, None) is invalid")
    return function


def _called(callee: Value, state: CaptureState, *args: Value, **kwargs: Value) -> Value:
    return callee.call(state, [*args], kwargs)


@dataclass(eq=False, repr=False)
class FunctionValue(MethodOwner, AttributeOwner):
    """A Python function, existing or made in the frame."""

    cls = types.FunctionType

    code: types.CodeType
    scope: dict[str, Any]
    closure: tuple[CellValue, ...]
    defaults: list[Value]
    keyword_defaults: dict[str, Value]
    real: Any = None
    source: Source | None = None
    annotations: Value | None = field(default=None, init=False)
    changes: dict[str, Value] = field(default_factory=dict, init=False)
    deleted: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.qualname: str = self.code.co_qualname if self.real is None else self.real.__qualname__

    def describe(self) -> str:
        return f"the function {self.qualname}"

    @property
    def is_library(self) -> bool:
        return is_library_name(self.scope.get("__name__"))

    def hash_key(self, state: CaptureState) -> Any:
        return self.real if self.real is not None else self

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if is_disabled(self.real):
            because = getattr(self.real, DISABLED_BECAUSE, None)
            reason = f"{self.describe()} is excluded from compilation"
            raise state.unsupported("disabled", f"{reason}: {because}" if because else reason)
        return state.inline(self, args, kwargs)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in self.changes and self.changes[name] is not MISSING:
            return self.changes[name]
        # ``__type_params__`` came with 3.12.
        of_code = ("__name__", "__qualname__", "__module__", "__doc__", "__code__", "__type_params__")
        if name in of_code and hasattr(types.FunctionType, name):
            return state.from_constant(getattr(self.real or self.bare_function(), name))
        if name in ("__defaults__", "__kwdefaults__", "__closure__", "__annotations__"):
            return self._part(state, name)
        if name == "__dict__":
            return self.instance_dict(state)
        if not hasattr(types.FunctionType, name):
            return self._stored(state, name)
        return super().get_attribute(state, name)

    def real_dict(self) -> dict[str, Any]:
        return {} if self.real is None else self.real.__dict__

    def dict_source(self) -> Source | None:
        return None if self.source is None or self.real is None else AttributeSource(self.source, "__dict__")

    def delete_attribute(self, state: CaptureState, name: str) -> None:
        self._stored(state, name)
        self.forget(state, name)

    def _stored(self, state: CaptureState, name: str) -> Value:
        """An attribute that was stored, before the frame or in it."""
        found = self.own_attribute(state, name)
        if found is None:
            self.guard_absent(state, name)
            raise state.raise_exception(AttributeError, f"'function' object has no attribute {name!r}")
        return found

    def bare_function(self) -> types.FunctionType:
        """A real function of the same code, to ask for what follows from the code alone."""
        cells = tuple(types.CellType() for _ in self.code.co_freevars)
        return types.FunctionType(self.code, {"__name__": self.scope.get("__name__")}, None, None, cells)

    def _part(self, state: CaptureState, name: str) -> Value:
        if name == "__defaults__" and self.defaults:
            return SequenceValue(list(self.defaults), tuple)
        if name == "__closure__" and self.closure:
            return SequenceValue(list(self.closure), tuple)
        if name == "__annotations__":
            if self.real is not None:
                place = None if self.source is None else AttributeSource(self.source, name)
                return state.wrap(self.real.__annotations__, place)
            self.annotations = self.annotations or DictValue({})
            return self.annotations
        if name == "__kwdefaults__" and self.keyword_defaults:
            raise state.unsupported("function-attribute", f"{name} of {self.describe()}")
        return ConstantValue(None)

    do___call__, do___get__ = _called, bind_function

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if name in ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__globals__", "__closure__"):
            raise state.unsupported("function-attribute", f"a store to {name!r} of a function")
        self.change(state, name, value)


class BoundMethodValue(MethodOwner):
    """A function bound to its first argument."""

    cls = types.MethodType

    def __init__(self, function: Value, owner: Value, source: Source | None = None) -> None:
        self.function = function
        self.owner = owner
        self.source = source

    def describe(self) -> str:
        return f"{self.function.describe()}, a method of {self.owner.describe()}"

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self.function.call(state, [self.owner, *args], kwargs)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "__self__":
            return self.owner
        if name == "__func__":
            return self.function
        if name == "__class__" or name in self.methods:
            return super().get_attribute(state, name)
        return self.function.get_attribute(state, name)

    do___call__ = _called

    def do___get__(self, state: CaptureState, *owner: Value) -> Value:
        return self

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(types.MethodType, self.function, self.owner)
