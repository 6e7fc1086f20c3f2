"""Rules for ``inspect`` and for read-only views, which answer questions about functions."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.existing_objects import CallableReferenceValue
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue, FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule
from gradsplit.compile_core.capture.values.mappings import DictValue, ReadOnlyView


@answer_to(types.MappingProxyType)
def _read_only(state: CaptureState, mapping: Value) -> Any:
    if not isinstance(mapping, DictValue):
        raise state.unsupported("call-of-builtin", f"MappingProxyType of {mapping.describe()}")
    return ReadOnlyView(mapping)


@call_rule(inspect.signature)
def _signature(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (function,) = args
    if kwargs:
        raise TypeError("signature() with options")
    try:
        signature = inspect.signature(_real_callable(state, function))
    except (TypeError, ValueError) as error:
        raise state.raise_exception(type(error), *error.args) from None
    return state.wrap(signature, None)


def _real_callable(state: CaptureState, value: Value) -> Any:
    """An existing callable with the same signature as a value."""
    if isinstance(value, BoundMethodValue):
        return types.MethodType(_real_callable(state, value.function), object())
    if isinstance(value, (FunctionValue, ClassValue, CallableReferenceValue)) and value.real is not None:
        return value.real
    if isinstance(value, FunctionValue) and not value.changes:
        return _stand_in(state, value)
    raise state.unsupported("signature", f"the signature of {value.describe()}")


def _stand_in(state: CaptureState, value: FunctionValue) -> types.FunctionType:
    """A function with the signature of one that was made in the frame."""
    try:
        defaults = tuple(state.realize(item).as_constant() for item in value.defaults)
        named = {name: item.as_constant() for name, item in value.keyword_defaults.items()}
    except NotConstant:
        raise state.unsupported("signature", f"{value.describe()} has defaults that are computed") from None
    made = value.bare_function()
    made.__defaults__, made.__kwdefaults__ = defaults, named
    return made


@answer_to(typing.get_type_hints)
def _type_hints(state: CaptureState, value: Value) -> Any:
    if not isinstance(value, (ClassValue, FunctionValue)) or value.real is None:
        raise state.unsupported("type-hints", f"the type hints of {value.describe()}")
    return state.from_constant(typing.get_type_hints(value.real))
