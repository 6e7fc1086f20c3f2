"""What a program says to the capture about its functions, and how the capture reads it.

Where torch marks a function by an attribute, the same attribute is used here: a function marked for ``torch.compile``
is marked for this capture too, and the reverse. What torch keeps in tables of its own is looked up there if torch's
front end is loaded; it is never imported for it.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.apart_from_torch_compile import DISABLED

# The attributes, as torch names them.
DISABLED_RECURSIVELY = "_torchdynamo_disable_recursive"
DISABLED_BECAUSE = "_torchdynamo_disable_msg"
ORIGINAL = "_torchdynamo_orig_callable"
# The id of the wrapper that these were set on: ``functools.wraps`` copies them to functions that are something else.
_WRAPPER_ID = "_torchdynamo_wrapper_id"
CONSTANT_RESULT = "_dynamo_marked_constant"

_TORCH_FRONT_END = "torch._dynamo"

_allowed: weakref.WeakSet[Any] = weakref.WeakSet()
_disallowed: weakref.WeakSet[Any] = weakref.WeakSet()


def graph_break(msg: str = "") -> None:
    """Ends the graph where it is called in compiled code, with ``msg`` as the reason; else it does nothing."""


def is_compiling() -> bool:
    """True in code that is being compiled, and hence in its compiled form; False in plain Python."""
    return False


def allow_in_graph(fn: Any) -> Any:
    """Makes calls of ``fn`` single nodes of the graph: the capture runs it on fake tensors and does not look inside.

    Its arguments and results must be tensors, numbers, strings, dtypes, devices or sequences of these; its result may
    depend on nothing but its arguments, and it may not change anything. None of this is checked.

    Args:
        fn: a function, or a list or tuple of functions.

    Returns:
        ``fn`` itself; for a sequence, a list.
    """
    if isinstance(fn, (list, tuple)):
        return [allow_in_graph(item) for item in fn]
    _disallowed.discard(_marked(fn))
    _allowed.add(_marked(fn))
    return fn


def disallow_in_graph(fn: Any) -> Any:
    """Ends the graph at every call of ``fn``, which then runs as plain Python.

    Holds for functions that are compiled from now on.

    Args:
        fn: an operation, such as ``torch.sub``, a function, or a list or tuple of them.

    Returns:
        ``fn`` itself; for a sequence, a list.
    """
    if isinstance(fn, (list, tuple)):
        return [disallow_in_graph(item) for item in fn]
    _allowed.discard(_marked(fn))
    _disallowed.add(_marked(fn))
    return fn


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``fn`` once, when a call of it is captured; compiled code then uses that result for ever. Returns ``fn``."""
    setattr(fn, CONSTANT_RESULT, True)
    return fn


def _marked(fn: Any) -> Any:
    """The object that carries the mark: bound methods are made anew at each look-up, their functions are not."""
    if not callable(fn):
        raise TypeError(f"{fn!r} is not callable")
    return fn.__func__ if isinstance(fn, types.MethodType) else fn


def is_allowed(function: Any) -> bool:
    return _contains(_allowed, function) or _in_table_of_torch("_allowed_callable_ids", function)


def is_disallowed(function: Any) -> bool:
    return _contains(_disallowed, function) or _in_table_of_torch("_disallowed_callable_ids", function)


def _contains(marked: weakref.WeakSet[Any], function: Any) -> bool:
    try:
        return function in marked
    except TypeError:
        return False  # not hashable, so nobody marked it


def _in_table_of_torch(table: str, function: Any) -> bool:
    rules = sys.modules.get(f"{_TORCH_FRONT_END}.trace_rules")
    return rules is not None and id(function) in getattr(rules, table, ())


def is_torch_front_end_function(function: Any, names: Sequence[str]) -> bool:
    """Whether ``function`` is one of these functions of torch's front end, told by where it was defined."""
    defined_in = getattr(function, "__module__", None) or ""
    return defined_in.startswith(_TORCH_FRONT_END + ".") and getattr(function, "__qualname__", "") in names


def mark_disabled(wrapper: Any, original: Any, recursive: bool, reason: str | None) -> None:
    """Say of ``wrapper``, which calls ``original``, that compilation leaves it alone."""
    setattr(wrapper, DISABLED, True)
    setattr(wrapper, DISABLED_RECURSIVELY, recursive)
    setattr(wrapper, DISABLED_BECAUSE, reason)
    setattr(wrapper, ORIGINAL, original)
    setattr(wrapper, _WRAPPER_ID, id(wrapper))


def leave_alone(function: Any) -> Any:
    """A decorator for functions that control compilation: called in compiled code, they run as plain Python."""
    mark_disabled(function, function, True, "it controls compilation")
    return function


def is_disabled(function: Any) -> bool:
    return getattr(function, DISABLED, False) is True and not _has_copied_mark(function)


def _has_copied_mark(function: Any) -> bool:
    """Whether an optimizer's wrapper, which runs the hooks, has the mark of what it wraps by ``functools.wraps``."""
    in_optimizers = getattr(function, "__globals__", {}).get("__name__") == "torch.optim.optimizer"
    return in_optimizers and getattr(function, _WRAPPER_ID, id(function)) != id(function)


def beneath_torch_front_end(function: Any) -> Any:
    """What torch's front end, once it is loaded, has wrapped for reasons of its own; None for all else.

    It excludes parts of ``torch.optim``, and notes when modules are made.
    """
    module = str(getattr(function, "__module__", ""))
    if is_disabled(function) and module.startswith("torch.optim."):
        return getattr(function, ORIGINAL, None)
    if module == "torch._dynamo.mutation_guard" and getattr(function, "__name__", "") == "patched_init":
        (cell,) = function.__closure__
        return cell.cell_contents
    return None


def is_disabled_recursively(function: Any) -> bool:
    return is_disabled(function) and bool(getattr(function, DISABLED_RECURSIVELY, False))


def disabled_frame(callee: Any) -> Any:
    """The Python function or bound method of which only the frame is disabled, None if ``callee`` is not one."""
    function = callee.__func__ if isinstance(callee, types.MethodType) else callee
    if not is_disabled(function) or is_disabled_recursively(function):
        return None
    original = getattr(function, ORIGINAL, function)
    if not isinstance(original, types.FunctionType):
        return original if isinstance(original, types.MethodType) and original is not callee else None
    return types.MethodType(original, callee.__self__) if isinstance(callee, types.MethodType) else original


_SCRIPTED_FROM = "_torchdynamo_inline"


def compiled_by_torch(value: Any) -> str | None:
    """The attribute that holds what ``torch.compile`` or ``torch.jit`` made a function from, or ``torch.compile`` a
    module; None if they did not make it."""
    if isinstance(value, torch.jit.ScriptFunction):
        return _SCRIPTED_FROM if hasattr(value, _SCRIPTED_FROM) else None
    if isinstance(value, types.FunctionType):
        own = hasattr(value, ORIGINAL) and getattr(value, _WRAPPER_ID, id(value)) == id(value)
        return ORIGINAL if own and not is_disabled(value) else None
    if isinstance(value, torch.nn.Module):
        cls = type(value)
        made_by_torch = (
            cls.__module__ == f"{_TORCH_FRONT_END}.eval_frame" and cls.__name__ == "OptimizedModule"
        )
        if made_by_torch and not is_disabled(value.__dict__.get("forward")):
            return "_orig_mod"
    return None
