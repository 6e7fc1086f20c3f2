"""Functions of the standard library that are closures or C code around the program's: known by their code."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from typing import Any

from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue


def recursive_repr(
    state: CaptureState, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """The wrapper of ``reprlib.recursive_repr``: an object inside of itself prints as the fill value."""
    cells = dict(zip(function.code.co_freevars, function.closure, strict=True))
    inner = state.realize(_content(cells["user_function"]))
    fill = state.realize(_content(cells["fillvalue"])) if "fillvalue" in cells else ConstantValue("...")
    running: list[Value] = state.running_texts
    if any(value is args[0] for value in running):
        return fill
    running.append(args[0])
    try:
        return inner.call(state, args, kwargs)
    finally:
        running.pop()


def dispatch(
    state: CaptureState, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """The function ``dispatch`` of a single-dispatch function: what is registered for a class, which is guarded."""
    (cls,) = args
    dispatcher = function.real
    if dispatcher is None:
        raise state.unsupported("single-dispatch", f"a call of {function.describe()}")
    real = cls.as_constant()
    found = dispatcher(real)
    place = state.reference_source("dispatch", dispatcher)
    text = f"{real.__qualname__} is dispatched as before"
    state.guards.add([place], "{0}({c0}) is {c1}", [real, found], text)
    return state.wrap(found, state.reference_source("implementation", found))


def _content(cell: Any) -> Any:
    assert cell.content is not None
    return cell.content


# Dataclasses have a wrapper of their own in some versions.
_of_dataclasses: Any = getattr(dataclasses, "_recursive_repr", reprlib.recursive_repr())

CLOSURE_RULES: dict[Any, Any] = {
    reprlib.recursive_repr()(lambda self: "").__code__: recursive_repr,
    _of_dataclasses(lambda self: "").__code__: recursive_repr,
    functools.singledispatch(lambda value: None).dispatch.__code__: dispatch,
}


class _Compared:
    """What ``functools.cmp_to_key`` makes of an object."""

    def __init__(self, compare: Any, value: Any) -> None:
        self.compare = compare
        self.value = value

    def __lt__(self, other: _Compared) -> bool:
        return self.compare(self.value, other.value) < 0

    def __gt__(self, other: _Compared) -> bool:
        return self.compare(self.value, other.value) > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compared) and self.compare(self.value, other.value) == 0

    __hash__ = None  # type: ignore[assignment]


@call_rule(functools.cmp_to_key)
def _cmp_to_key(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    maker = state.wrap(functools.partial, None)
    return maker.call(state, [state.wrap(_Compared, None), *args, *kwargs.values()], {})
