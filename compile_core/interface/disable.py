"""``disable``: functions that compilation leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture import directives
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule, wrap_module


@directives.leave_alone
def disable(
    fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None
) -> Any:
    """Excludes a function from compilation: where compiled code calls it, the graph ends and Python runs it.

    Args:
        fn: a function, a module (its call is excluded) or a class (its ``__init__`` and ``__call__`` are); left out,
            ``disable`` is a decorator. Of a compiled function, what it was made from runs.
        recursive: what ``fn`` calls is left alone too. If False, only the frame of ``fn`` itself runs as plain Python,
            and the functions and modules that it calls are compiled, where it is called from compiled code.
        reason: shown where the graph ends.

    Returns:
        A function with the same signature; a module that shares everything with ``fn``; the class itself.
    """
    if fn is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(disable(fn.__func__, recursive, reason=reason))
    if isinstance(fn, type):
        fn.__init__ = disable(fn.__init__, recursive, reason=reason)
        if "__call__" in fn.__dict__:
            fn.__call__ = disable(fn.__dict__["__call__"], recursive, reason=reason)
        return fn
    if not callable(fn):
        raise TypeError(f"disable takes something callable, not {type(fn).__name__}")
    if isinstance(fn, CompiledModule):
        fn = fn._orig_mod
    if isinstance(fn, torch.nn.Module):
        return wrap_module(fn, _disabled(fn, recursive, reason))
    return _disabled(fn.original if isinstance(fn, CompiledFunction) else fn, recursive, reason)


def _disabled(fn: Callable[..., Any], recursive: bool, reason: str | None) -> Callable[..., Any]:
    def run_plain(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if not isinstance(fn, torch.nn.Module):
        functools.update_wrapper(run_plain, fn)
    directives.mark_disabled(run_plain, fn, recursive, reason)
    return run_plain
