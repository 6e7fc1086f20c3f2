"""Classes that the frame makes: made once, for real, at the capture, where each call would make one like it.

Their bodies are functions and literals; whatever else a class statement does is left to Python. The class does not
leave the call, so nobody can tell that another call has had it: neither it nor an object of it is handed out, and
nothing is stored in it.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value, constants_of
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_literal
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.references import ReferenceValue

_METACLASSES = (type, abc.ABCMeta, type(torch.autograd.Function))
# What bodies of functions and literals consist of.
_INSTRUCTIONS = frozenset(
    [
        *("RESUME", "NOP", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL", "SETUP_ANNOTATIONS"),
        *("PUSH_NULL", "LOAD_NAME", "STORE_NAME", "LOAD_CONST", "LOAD_CLOSURE", "LOAD_FAST", "BUILD_TUPLE"),
        *("STORE_SUBSCR", "COPY", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "PRECALL", "CALL"),
        *("RETURN_VALUE", "RETURN_CONST", "POP_TOP"),
    ]
)
_DECORATORS = ("staticmethod", "classmethod", "property")
_TYPES = ("object", "int", "float", "str", "bool", "bytes", "list", "dict", "tuple", "set")


@call_rule(builtins.__build_class__)
def _build_class(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    body, name, *bases = args
    given = _real_bases(state, bases)
    if kwargs or not isinstance(body, FunctionValue) or not _is_plain(body.code, body.scope):
        raise state.unsupported("class-statement", "a class whose body is more than functions and literals")
    return _made(state, builtins.__build_class__, _real_function(state, body), name.as_constant(), *given)


def _real_bases(state: CaptureState, bases: list[Value]) -> list[type]:
    """Bases that do nothing of their own when a class is derived from them."""
    real = [base.real for base in bases if isinstance(base, ClassValue)]
    quiet = all(
        type(base) in _METACLASSES and all("__init_subclass__" not in vars(up) for up in base.__mro__[:-1])
        for base in real
    )
    if len(real) < len(bases) or not quiet:
        raise state.unsupported("class-statement", "a class with bases that are told of it")
    return real


def _made(state: CaptureState, make: Callable[..., type], *args: Any, **kwargs: Any) -> Value:
    try:
        real = make(*args, **kwargs)
    except Exception as error:
        raise state.unsupported("class-statement", f"a class that raises {error!r}") from error
    state.made_classes.append(real)
    return state.wrap(real, None)


def _is_plain(code: types.CodeType, scope: dict[str, Any]) -> bool:
    stored = {"__name__", "__qualname__", "__module__", "__annotations__"}
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname not in _INSTRUCTIONS:
            return False
        if instruction.opname == "STORE_NAME":
            stored.add(name)
        elif instruction.opname == "LOAD_NAME":
            known = name in stored or (name in (*_DECORATORS, *_TYPES) and name not in scope)
            if not known:
                return False
    return True


def _real_function(state: CaptureState, function: FunctionValue) -> types.FunctionType:
    """A function for real; what it closes over is known and, as a library's, stays."""
    cells = []
    for cell in function.closure:
        content = None if cell.content is None else state.realize(cell.content)
        if content is None or not function.is_library:
            raise state.unsupported(
                "class-statement", "a class that reads variables of the frame that makes it"
            )
        cells.append(types.CellType(_real_object(state, content)))
    defaults = tuple(_real_object(state, state.realize(value)) for value in function.defaults)
    code, scope = function.code, function.scope
    return types.FunctionType(code, scope, code.co_name, defaults, tuple(cells))


def _real_object(state: CaptureState, value: Value) -> Any:
    if isinstance(value, FunctionValue):
        return _real_function(state, value) if value.real is None else value.real
    if isinstance(value, ReferenceValue):
        return value.real
    if isinstance(value, SequenceValue) and value.cls is tuple:
        return tuple(_real_object(state, item) for item in value.all(state))
    if not isinstance(value, ConstantValue) or not is_literal(value.value):
        raise state.unsupported("class-statement", f"a class that reads {value.describe()}")
    return value.value


@call_rule(collections.namedtuple)
def _named_tuple(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    named = {key: value.as_constant() for key, value in kwargs.items()}
    fields = [state.items_of(value) if not isinstance(value, ConstantValue) else value for value in args[1:2]]
    real = [constants_of(value) if isinstance(value, list) else value.as_constant() for value in fields]
    named.setdefault("module", state.calling_module())
    return _made(state, collections.namedtuple, args[0].as_constant(), *real, **named)


def make_by_type(state: CaptureState, args: list[Value]) -> Value:
    """``type(name, bases, namespace)``."""
    name, bases, namespace = args
    given = _real_bases(state, state.items_of(bases))
    if not isinstance(namespace, DictValue) or namespace.source is not None:
        raise state.unsupported("class-statement", "type() with a namespace that was there before")
    entries = namespace.entries.values()
    content = {key.as_constant(): _real_object(state, state.realize(item)) for key, item in entries}
    content.setdefault("__module__", state.calling_module())
    return _made(state, type, name.as_constant(), tuple(given), content)


_dataclass = dataclasses.dataclass


@call_rule(dataclasses.dataclass)
def _make_dataclass(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Of a class that the frame made, of which nobody has read anything yet."""
    if not args:
        maker = state.wrap(functools.partial, None)
        return maker.call(state, [state.wrap(dataclasses.dataclass, None)], kwargs)
    (cls,) = args
    options = {key: value.as_constant() for key, value in kwargs.items()}
    read = isinstance(cls, ClassValue) and any(cls.real in key for key in state.class_entries)
    if not isinstance(cls, ClassValue) or cls.real not in state.made_classes or read:
        raise state.unsupported("class-statement", f"a dataclass of {cls.describe()}")
    _dataclass(cls.real, **options)
    return cls


def refuse_made(state: CaptureState, cls: Any) -> None:
    """A class that the frame made must stay there."""
    if any(cls is made for made in state.made_classes):
        raise state.unsupported(
            "made-class", f"the class {cls.__qualname__}, or an object of it, is handed out"
        )
