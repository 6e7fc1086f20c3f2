"""What a call of something callable runs: its Python function."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core.capture.directives import is_disabled
from gradsplit.compile_core.capture.object_model.libraries import is_library_name, runs_code_of_users

# The owner of a function that is bound to no object.
NO_OWNER: Any = object()


class Compiled:
    """What a compiled function is to a capture: it stands for what it was made from."""

    original: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def frame_code(self) -> types.CodeType:
        """The code of the frame that each call has."""
        raise NotImplementedError


def original_of(value: Any) -> Any:
    """What a compiled function was made from; anything else is returned as it is."""
    return value.original if isinstance(value, Compiled) else value


@dataclass(frozen=True)
class Target:
    """What is captured: a Python function with the object that is its first argument.

    Attributes:
        owner: that object, or ``NO_OWNER``.
        is_module_call: it is a module, which is called through ``nn.Module.__call__``.
        cells_argument: the frame's first argument is the tuple of the closure's cells.
        cells: these, where they do not come with each call.
    """

    function: Any
    owner: Any
    is_module_call: bool
    cells_argument: bool = False
    cells: tuple[types.CellType, ...] | None = None

    @property
    def subject(self) -> Any:
        """What distinguishes calls of objects, which run ``call_object``: what their code depends on."""
        return _subject(self.owner) if self.function is call_object else None

    def unbound(self) -> Target:
        """The same with owner and cells as arguments, for all that share the code; it holds no closure."""
        function = self.function
        if function.__closure__ is not None:
            empty = tuple(types.CellType() for _ in function.__closure__)
            function = types.FunctionType(
                function.__code__, function.__globals__, function.__name__, None, empty
            )
        return Target(function, NO_OWNER, self.is_module_call, self.cells_argument)


class ModulesApart:
    """Modules that are compiled by themselves, wherever they are called. These here are none."""

    def claims(self, module: torch.nn.Module) -> bool:
        return False

    def form_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        raise NotImplementedError


def call_object(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The frame that stands for the call of an object whose own code is not a plain Python function."""
    return self(*args, **kwargs)


def _subject(owner: Any) -> Any:
    if isinstance(owner, functools.partial):
        return _subject(owner.func)
    if isinstance(owner, types.MethodType):
        return _subject(owner.__func__)
    if isinstance(owner, types.FunctionType):
        return owner.__code__
    return owner if isinstance(owner, types.BuiltinFunctionType) else type(owner)


def shown_name(target: Target) -> str:
    """The name of what is called, for messages."""
    called = target.owner if target.function is call_object else target.function
    while isinstance(called, (functools.partial, types.MethodType)):
        called = called.func if isinstance(called, functools.partial) else called.__func__
    if isinstance(called, torch.nn.Module):
        return f"{type(called).__qualname__}.forward"
    return getattr(called, "__qualname__", None) or type(called).__qualname__


def find_target(fn: Any) -> Target:
    """The Python function that a callable runs, with its owner and cells."""
    found = _find_target(fn)
    cells = found.function.__closure__
    return found if cells is None else replace(found, cells_argument=True, cells=cells)


def _find_target(fn: Any) -> Target:
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


def takes_object_among_others(callee: Any) -> bool:
    """Whether it is a method that takes its object as one of ``*args``, as decorated ones do."""
    if not isinstance(callee, types.MethodType) or not isinstance(callee.__func__, types.FunctionType):
        return False
    code = callee.__func__.__code__
    return not code.co_argcount and bool(code.co_flags & inspect.CO_VARARGS)


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def find_callee_target(callee: Any) -> Target | None:
    """The target of what a graph break calls, None for what has no code of the user."""
    if isinstance(callee, (type, types.BuiltinFunctionType)) or not callable(callee):
        return None
    if type(callee) in weakref.ProxyTypes:
        return None
    target = find_target(callee)
    library = not runs_code_of_users(target.function)
    if target.function is call_object or (library and not target.is_module_call):
        return None
    if is_disabled(target.function) or target.function.__code__.co_flags & _SUSPENDED:
        return None
    return replace(target, cells=None)


def plain_frame(callee: Any) -> Any:
    """A function or method whose frame runs as plain Python, None for all else: one of the user's whose calls are
    generators, and those of LBFGS, which decides after each of its few operations how to go on."""
    function = callee.__func__ if isinstance(callee, types.MethodType) else callee
    if not isinstance(function, types.FunctionType) or is_disabled(function):
        return None
    module = function.__globals__.get("__name__")
    is_generator = inspect.isgeneratorfunction(function) and not is_library_name(module)
    return callee if is_generator or module == torch.optim.LBFGS.__module__ else None


def method_target(method: types.MethodType) -> Target:
    """The target of a bound method, whosoever wrote it."""
    function = method.__func__
    return Target(function, method.__self__, False, function.__closure__ is not None)


class CalledForward:
    """The forward that calls of a module end in: a program may replace it, on the module or its class."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known = self._now()

    def has_changed(self) -> bool:
        """Whether it is another than when this was made or called last. Called at each call of the target."""
        own, of_class = self._now()
        if own is self._known[0] and of_class is self._known[1]:
            return False
        self._known = own, of_class
        return True

    def _now(self) -> tuple[Any, Any]:
        return self._module.__dict__.get("forward"), type(self._module).forward


class CalledCode:
    """What a function is made of: a program may replace it, as notebooks do that reload an edited file."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._code = function.__code__
        self._defaults = function.__defaults__
        self._keyword_defaults = function.__kwdefaults__

    def has_changed(self) -> bool:
        """Whether it is another than when this was made. Called at each call of the target."""
        function = self._function
        return (
            function.__code__ is not self._code
            or function.__defaults__ is not self._defaults
            or function.__kwdefaults__ is not self._keyword_defaults
        )
