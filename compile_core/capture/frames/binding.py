"""Binding the arguments of a call to the parameters of a Python function."""

from __future__ import annotations

import inspect
from typing import Any

from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import new_dict
from gradsplit.compile_core.errors import InternalError


def bind_arguments(
    state: CaptureState, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """The locals at the start of a call; a call that does not fit raises TypeError in the captured
    program."""
    code = function.code
    names = code.co_varnames
    count = code.co_argcount
    keyword_only = names[count : count + code.co_kwonlyargcount]
    by_name = names[code.co_posonlyargcount : count]
    bound: dict[str, Value] = dict(zip(names[:count], args, strict=False))
    extra = args[count:]
    rest: dict[str, Value] = {}
    takes_rest = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    fits = not extra or bool(code.co_flags & inspect.CO_VARARGS)
    for name, value in kwargs.items():
        if name in by_name or name in keyword_only:
            fits = fits and name not in bound
            bound[name] = value
        else:
            fits = fits and takes_rest
            rest[name] = value
    first_default = count - len(function.defaults)
    for position, name in enumerate(names[:count]):
        if name not in bound and position >= first_default:
            default = state.realize(function.defaults[position - first_default])
            function.defaults[position - first_default] = default
            bound[name] = default
    for name in keyword_only:
        if name not in bound and name in function.keyword_defaults:
            bound[name] = function.keyword_defaults[name]
    if not fits or len(bound) != count + len(keyword_only):
        raise state.raise_exception(TypeError, _explain_misfit(function, len(args), tuple(kwargs)))
    position = count + len(keyword_only)
    if code.co_flags & inspect.CO_VARARGS:
        bound[names[position]] = SequenceValue(list(extra), tuple)
        position += 1
    if takes_rest:
        pairs: list[tuple[Value, Value]] = [(ConstantValue(name), value) for name, value in rest.items()]
        bound[names[position]] = new_dict(pairs, state)
    return bound


def _explain_misfit(function: FunctionValue, positional: int, named: tuple[str, ...]) -> str:
    """Python's own words: an empty function with the same signature is called in the same way."""
    code = function.code
    names = code.co_varnames
    first_default = code.co_argcount - len(function.defaults)
    parts = []
    for position, name in enumerate(names[: code.co_argcount]):
        parts.append(f"{_plain_name(name)}=None" if position >= first_default else _plain_name(name))
        if position + 1 == code.co_posonlyargcount:
            parts.append("/")
    keyword_only = names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & inspect.CO_VARARGS:
        parts.append("*rest_of_the_arguments")
    elif keyword_only:
        parts.append("*")
    parts += [f"{name}=None" if name in function.keyword_defaults else name for name in keyword_only]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parts.append("**rest_of_the_keywords")
    scope: dict[str, Any] = {}
    exec(f"def stand_in({', '.join(parts)}): pass", scope)
    stand_in = scope["stand_in"]
    stand_in.__qualname__ = function.qualname
    try:
        stand_in(*[None] * positional, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    raise InternalError(f"{function.describe()}: a call that fits was refused")


def _plain_name(name: str) -> str:
    """The parameter of a comprehension is called ``.0``."""
    return name if name.isidentifier() else "items"
