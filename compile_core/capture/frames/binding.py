"""Binding the arguments of a call to the parameters of a Python function."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from gradsplit.compile_core.capture.code_objects.instructions import parameter_names
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value

_REST = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def bind_arguments(
    state: CaptureState, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """The locals at the start of a call; a call that does not fit raises TypeError in the captured
    program.

    Python itself binds them, in its own words where they do not fit: to a function that has the parameters.
    """
    code, defaults = function.code, function.defaults
    stand_in = types.FunctionType(only_binds(code), {}, code.co_name, tuple(defaults))
    stand_in.__kwdefaults__ = function.keyword_defaults
    stand_in.__qualname__ = function.qualname
    try:
        bound = stand_in(*args, **kwargs)
    except TypeError as error:
        raise state.raise_exception(TypeError, str(error)) from None
    for position, name in enumerate(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]):
        if bound[name] is defaults[position]:
            bound[name] = defaults[position] = state.realize(defaults[position])
    for name in parameter_names(code)[code.co_argcount + code.co_kwonlyargcount :]:
        bound[name] = state.from_constant(bound[name])
    return bound


@functools.lru_cache(maxsize=4096)
def only_binds(code: types.CodeType) -> types.CodeType:
    """A code object with the same parameters, which returns what they hold."""
    names = parameter_names(code)
    return _held.__code__.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=names,
        co_nlocals=len(names),
        co_flags=_held.__code__.co_flags | code.co_flags & _REST,
    )


def _held() -> dict[str, Any]:
    return locals()
