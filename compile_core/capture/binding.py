"""Binding the arguments of a call to the parameters of a Python function."""

from __future__ import annotations

import inspect

from compile_core.capture.base import CaptureState, Value
from compile_core.capture.constants import ConstantValue
from compile_core.capture.containers import SequenceValue
from compile_core.capture.functions import FunctionValue
from compile_core.capture.mappings import new_dict


def bind_arguments(
    state: CaptureState, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """The locals at the start of a call; a call that does not fit raises TypeError in the captured
    program."""
    code = function.code
    names = code.co_varnames
    count = code.co_argcount
    keyword_only = names[count : count + code.co_kwonlyargcount]
    bound: dict[str, Value] = dict(zip(names[:count], args, strict=False))
    extra = args[count:]
    rest: dict[str, Value] = {}
    for name, value in kwargs.items():
        if name in bound and name in names[code.co_posonlyargcount : count]:
            raise state.raise_exception(TypeError, f"{function.name}() got multiple values for {name!r}")
        if name in names[code.co_posonlyargcount : count] or name in keyword_only:
            bound[name] = value
        else:
            rest[name] = value
    first_default = count - len(function.defaults)
    for position, name in enumerate(names[:count]):
        if name not in bound:
            if position < first_default:
                raise state.raise_exception(TypeError, f"{function.name}() missing the argument {name!r}")
            default = state.realize(function.defaults[position - first_default])
            function.defaults[position - first_default] = default
            bound[name] = default
    for name in keyword_only:
        if name not in bound:
            if name not in function.keyword_defaults:
                raise state.raise_exception(TypeError, f"{function.name}() missing the argument {name!r}")
            bound[name] = function.keyword_defaults[name]
    position = count + len(keyword_only)
    if code.co_flags & inspect.CO_VARARGS:
        bound[names[position]] = SequenceValue(list(extra), tuple)
        position += 1
    elif extra:
        raise state.raise_exception(
            TypeError, f"{function.name}() takes {count} arguments, {len(args)} given"
        )
    if code.co_flags & inspect.CO_VARKEYWORDS:
        pairs: list[tuple[Value, Value]] = [(ConstantValue(name), value) for name, value in rest.items()]
        bound[names[position]] = new_dict(pairs, state)
    elif rest:
        raise state.raise_exception(
            TypeError, f"{function.name}() got an unexpected argument {next(iter(rest))!r}"
        )
    return bound
