"""The operations that take a float which differs between calls, without being captured for each value of it.

The capture runs an operation on fake tensors with the float of this call. What it learns there holds for every float
if the float is but a factor, a summand or a bound for elements: shapes, dtypes and which results are inputs stay. It
does not for ``arange`` or for ``interpolate``. A probability must lie between 0 and 1, which is a guard: a dropout
returns its input where nothing is dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_ARITHMETIC = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.imod),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.floordiv, operator.setitem),
)

# By name, as functions, as methods, and with the underscore of the form in place.
_NAMES = frozenset(
    (
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"),
        *("pow", "float_power", "remainder", "fmod", "floor_divide", "copysign", "xlogy"),
        *("eq", "ne", "lt", "le", "gt", "ge", "less", "greater", "less_equal", "greater_equal", "not_equal"),
        *("addcmul", "addcdiv", "addmm", "addmv", "addr", "addbmm", "baddbmm", "lerp"),
        *("clamp", "clamp_min", "clamp_max", "clip", "where", "masked_fill", "index_add", "index_fill"),
        *("fill", "full", "full_like", "new_full"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
        *("__truediv__", "__rtruediv__", "__pow__", "__rpow__"),
    )
)
_OF_PROBABILITIES = frozenset(["bernoulli", "dropout"])
_FOREACH = frozenset(
    f"_foreach_{name}"
    for name in ("add", "sub", "mul", "div", "pow", "addcmul", "addcdiv", "lerp", "clamp_min", "clamp_max")
)
_FUSED = frozenset(["_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"])


def takes_open_floats(target: Callable[..., Any] | str) -> bool:
    """Whether all that is known of an operation's results is the same for every float among its arguments."""
    if target in _ARITHMETIC:
        return True
    name = _plain_name(target)
    return name in _NAMES or name in _FOREACH or name in _FUSED or name in _OF_PROBABILITIES


def takes_probability(target: Callable[..., Any] | str) -> bool:
    """Whether floats among an operation's arguments are probabilities."""
    return _plain_name(target) in _OF_PROBABILITIES


def _plain_name(target: Callable[..., Any] | str) -> str:
    """The name of a function or method of torch, without the underscore of the form in place; of others none, since an
    operator of somebody else may have any name."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    of_torch = (getattr(scope, name, None) for scope in (torch, torch.Tensor, functional))
    if not isinstance(target, str) and target not in of_torch:
        return ""
    return name if name.endswith("__") else name.removesuffix("_")
