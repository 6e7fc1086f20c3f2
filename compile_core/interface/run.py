"""``run``: what is compiled already, and nothing new."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture import directives, run_only
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction, living_functions
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule, wrap_module


@directives.leave_alone
def run(fn: Callable[..., Any] | None = None) -> Any:
    """A function that uses the compiled entries of ``fn`` and makes none: a call that fits none runs as plain Python.

    This holds for all that such a call reaches, in its thread.

    Args:
        fn: a compiled function or module, or what one was made from: of several, the last. Left out, ``run`` is a
            decorator.
    """
    if fn is None:
        return run
    if not callable(fn):
        raise TypeError(f"run takes something callable, not {type(fn).__name__}")
    compiled = _compiled_form(fn)

    def run_compiled(*args: Any, **kwargs: Any) -> Any:
        with run_only():
            return compiled(*args, **kwargs)

    if isinstance(fn, torch.nn.Module):
        return wrap_module(fn._orig_mod if isinstance(fn, CompiledModule) else fn, run_compiled)
    functools.update_wrapper(run_compiled, fn)
    directives.mark_disabled(run_compiled, fn, True, "run() compiles nothing")
    return run_compiled


def _compiled_form(fn: Any) -> Callable[..., Any]:
    if isinstance(fn, (CompiledFunction, CompiledModule)):
        return fn
    found = [function for function in living_functions() if _is_same(function.original, fn)]
    return found[-1] if found else fn


def _is_same(one: Any, other: Any) -> bool:
    """Bound methods are made anew at each look-up, so they are compared; nothing else is."""
    return one is other or (type(one) is type(other) is types.MethodType and one == other)
