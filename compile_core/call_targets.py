"""What a call of something callable runs: the Python function behind it, and how its parameters are passed on."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

import torch

from compile_core.capture import argument_names, compile_function
from compile_core.capture.directives import is_disabled
from compile_core.capture.object_model.libraries import is_library_name
from compile_core.ir.sources import identifier_of, variable_of

# The owner of a function that is bound to no object.
NO_OWNER: Any = object()

_UNUSED_DEFAULT: Any = object()


@dataclass(frozen=True)
class Target:
    """The Python function that is captured, the object that is its first argument (or ``NO_OWNER``), and
    whether that object is a module which is called through ``nn.Module.__call__``."""

    function: Any
    owner: Any
    is_module_call: bool
    cells_argument: bool = False


class ModulesApart:
    """Modules that are compiled by themselves, wherever they are called. These here are none."""

    def claims(self, module: torch.nn.Module) -> bool:
        return False

    def form_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        raise NotImplementedError


def call_object(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The frame that stands for the call of an object whose own code is not a plain Python function."""
    return self(*args, **kwargs)


def find_target(fn: Any) -> Target:
    """The Python function behind a callable."""
    if isinstance(fn, types.FunctionType):
        return Target(fn, NO_OWNER, False)
    if isinstance(fn, types.MethodType):
        function = fn.__func__
        if isinstance(function, types.FunctionType) and function.__code__.co_argcount:
            return Target(function, fn.__self__, False)
        # A decorated method takes its object as one of *args; so may ``forward``.
        return Target(call_object, fn, False)
    if isinstance(fn, torch.nn.Module):
        forward = inspect.getattr_static(type(fn), "forward")
        plain = type(fn).__call__ is torch.nn.Module.__call__ and "forward" not in fn.__dict__
        if plain and isinstance(forward, types.FunctionType) and forward.__code__.co_argcount:
            return Target(forward, fn, True)
        return Target(call_object, fn, False)
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(call, types.FunctionType):
        return Target(call, fn, False)
    if callable(fn):
        return Target(call_object, fn, False)
    raise TypeError(f"cannot compile {fn!r}: it is not callable")


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def find_callee_target(callee: Any) -> Target | None:
    """The target of what a graph break calls, None for what has no code of the user."""
    if isinstance(callee, (type, types.BuiltinFunctionType)) or not callable(callee):
        return None
    target = find_target(callee)
    library = is_library_name(target.function.__globals__.get("__name__"))
    if target.function is call_object or (library and not target.is_module_call):
        return None
    if is_disabled(target.function) or target.function.__code__.co_flags & _SUSPENDED:
        return None
    return _with_cells(target)


def method_target(method: types.MethodType) -> Target:
    """The target of a bound method, whosoever wrote it."""
    return _with_cells(Target(method.__func__, method.__self__, False))


def _with_cells(target: Target) -> Target:
    return replace(target, cells_argument=target.function.__closure__ is not None)


def signature_text(function: types.FunctionType, skip_first: bool) -> tuple[str, str]:
    """Parameters of the dispatch function (with the target's names), and how it passes them on."""
    code = function.__code__
    names = list(map(identifier_of, argument_names(code)))
    positional = names[: code.co_argcount]
    keyword_only = names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = names[code.co_argcount + code.co_kwonlyargcount :]
    first_default = len(positional) - len(function.__defaults__ or ())
    parts: list[str] = []
    for index, name in enumerate(positional):
        if index or not skip_first:
            parts.append(f"{name}=_gs_default" if index >= first_default else name)
        if index + 1 == code.co_posonlyargcount and parts:
            parts.append("/")
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{rest.pop(0)}")
    elif keyword_only:
        parts.append("*")
    defaults = function.__kwdefaults__ or {}
    parts += [f"{name}=_gs_default" if name in defaults else name for name in keyword_only]
    if rest:
        parts.append(f"**{rest[0]}")
    passed = ["_gs_first" if skip_first and index == 0 else name for index, name in enumerate(names)]
    return ", ".join(parts), ", ".join(passed)


def bound_function(target: Target, name: str, body: str, constants: Mapping[str, Any]) -> types.FunctionType:
    """A function with the signature of the target's own, which binds arguments as Python does.

    Args:
        body: its lines. ``{passed}`` stands for the frame's arguments, each of which may be ``_gs_default``.
        constants: what the body names. The parameters keep the user's names, so all else is named as no program does.
    """
    function = target.function
    signature, passed = signature_text(function, skip_first=target.owner is not NO_OWNER)
    if target.cells_argument:
        signature = f"_gs_cells, {signature}"
        passed = f"_gs_cells, {passed}" if passed else "_gs_cells"
    if not passed:
        body = body.replace(", {passed})", ")").replace("({passed},)", "()")
    body = indent(body.replace("{passed}", passed), "    ")
    made = compile_function(
        f"def {name}({signature}):\n{body}", name, {**constants, "_gs_default": _UNUSED_DEFAULT}
    )
    assert isinstance(made, types.FunctionType)
    made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__name__ = function.__name__
    return made


def plain_call_text(target: Target) -> str:
    """The function ``plain``: takes the frame's arguments and calls the original as its caller did.

    It is called ``original``, or is what ``with_cells`` makes of the closure's cells, where they are an argument.
    """
    code = target.function.__code__
    names = list(argument_names(code))
    parts = [variable_of(name) for name in names[: code.co_argcount]]
    if target.owner is not NO_OWNER:
        parts = parts[1:]  # the original is bound to it
    position = code.co_argcount + code.co_kwonlyargcount
    keyword_only = names[code.co_argcount : position]
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{variable_of(names[position])}")
        position += 1
    parts += [f"{name}={variable_of(name)}" for name in keyword_only]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parts.append(f"**{variable_of(names[position])}")
    arguments = ", ".join(map(variable_of, argument_names(code, target.cells_argument)))
    passes_cells = target.cells_argument and not target.is_module_call
    called = "with_cells(l__gs_cells)" if passes_cells else "original"
    return f"def plain({arguments}):\n    return {called}({', '.join(parts)})\n"
