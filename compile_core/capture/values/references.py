"""Existing objects that are known by identity: built-in functions, classes, whatever else a program asks little of."""

from __future__ import annotations

import types
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.ir.sources import Source

_NAMED_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ModuleType,
)


class ReferenceValue(Value):
    """An existing object, compared by identity."""

    def __init__(self, real: Any, source: Source | None = None) -> None:
        self.real = real
        self.source = source

    def python_type(self) -> type:
        return type(self.real)

    def describe(self) -> str:
        kind = type(self.real).__name__
        if isinstance(self.real, (*_NAMED_TYPES, type)):
            return f"{kind} {self.real.__name__}"
        name = vars(type(self.real)).get("__qualname__") or getattr(self.real, "__dict__", {}).get("__name__")
        return f"an object of type {kind}" + (f" ({name})" if isinstance(name, str) else "")

    def hash_key(self, state: CaptureState) -> Any:
        return self.real
