"""``str``, ``repr`` and ``format`` over all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradsplit.compile_core.capture.object_model.exceptions import ExceptionValue
from gradsplit.compile_core.capture.object_model.objects import OWN_OF_PYTHON, InstanceValue, call_class_entry
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, ask_python, fold
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.stand_ins import StandIn

# Built-in bases whose ``__repr__`` does not name the class.
_SHOWN_AS_BASE = (str, int, float, bytes, list, dict, tuple)


def text(state: CaptureState, value: Value) -> Value:
    """``str(value)``."""
    if isinstance(value, InstanceValue):
        own = _own_method(state, value, "__str__", [])
        if own is not None:
            return own
        if isinstance(value, ExceptionValue):
            return value.text(state)
        if isinstance(value.content, ConstantValue):
            return text(state, value.content)
        return representation(state, value)
    if _is_literal_text(value):
        return fold(state, str, [value], {})
    return representation(state, value)


def representation(state: CaptureState, value: Value) -> Value:
    """``repr(value)``."""
    if isinstance(value, InstanceValue):
        own = _own_method(state, value, "__repr__", [])
        if own is not None:
            return own
        if isinstance(value, ExceptionValue):
            return value.representation(state)
        if value.content is not None and value.content.python_type() in _SHOWN_AS_BASE:
            return representation(state, value.content)
        raise state.unsupported("text", f"the text of {value.describe()} shows its address")
    if _is_literal_text(value):
        return fold(state, repr, [value], {})
    held = _python_object(state, value, {})
    if isinstance(held, StandIn):
        raise state.unsupported("text", f"no rule for the text of {value.describe()}")
    return ConstantValue(ask_python(state, repr, held))


def formatted(state: CaptureState, value: Value, spec: Value) -> Value:
    """``format(value, spec)``."""
    if not isinstance(value, InstanceValue):
        if _is_literal_text(value):
            return fold(state, format, [value, spec], {})
        shown = representation(state, value)
    else:
        own = _own_method(state, value, "__format__", [spec])
        if own is not None:
            return own
        if isinstance(value.content, ConstantValue) and spec.as_constant() != "":
            return fold(state, format, [value.content, spec], {})
        shown = text(state, value)
    if spec.as_constant() != "":
        name = value.python_type().__name__
        message = f"unsupported format string passed to {name}.__format__"
        raise state.raise_exception(TypeError, message)
    return shown


def converted(state: CaptureState, value: Value, conversion: Callable[[object], str] | None) -> Value:
    """A value of an f-string after ``!s``, ``!r`` or ``!a``."""
    if conversion is None:
        return value
    if conversion is str:
        return text(state, value)
    shown = representation(state, value)
    return shown if conversion is repr else fold(state, lambda real: ascii(real)[1:-1], [shown], {})


def _is_literal_text(value: Value) -> bool:
    """Whether the real object is known, so that Python itself makes the text."""
    try:
        value.as_constant()
    except NotConstant:
        return False
    return True


def fill_format(state: CaptureState, pattern: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """``pattern.format(*args, **kwargs)``; objects of the program give texts of their own."""

    def known(value: Value) -> Any:
        return value.as_constant() if _is_literal_text(value) else StandIn(state, value)

    reals = [known(value) for value in args], {name: known(value) for name, value in kwargs.items()}
    return fold(state, lambda: pattern.format(*reals[0], **reals[1]), [], {})


def _own_method(state: CaptureState, value: InstanceValue, name: str, args: list[Value]) -> Value | None:
    """What a method gives that the class defines in Python; None where Python's own is in place."""
    return call_class_entry(state, value, value.cls, name, args, but=OWN_OF_PYTHON)


def _python_object(state: CaptureState, value: Value, made: dict[int, Any]) -> Any:
    """A container for real, with stand-ins for its items; one that is part of itself is so here, as ``made`` tells."""
    if id(value) in made:
        return made[id(value)]

    def parts(values: Iterable[Value]) -> Iterator[Any]:
        return (_python_object(state, part, made) for part in values)

    if isinstance(value, ListValue):
        held = made[id(value)] = value.python_object([])
        held.extend(parts(value.all(state)))
        return held
    if isinstance(value, SequenceValue) and (value.cls is tuple or hasattr(value.cls, "_make")):
        return getattr(value.cls, "_make", tuple)(parts(value.all(state)))
    if isinstance(value, DictValue) and value.cls is dict:
        held = made[id(value)] = {}
        held.update(tuple(parts(pair)) for pair in value.pairs(state))
        return held
    return slice(*parts(value.parts)) if isinstance(value, SliceValue) else StandIn(state, value)
