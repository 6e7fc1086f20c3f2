"""``__torch_function__``: which functions of torch ask the classes and modes that define it, and what they ask.

Torch itself tells: the call is made under a mode that notes what it is asked, and computes nothing.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from gradsplit.compile_core.torch_facts.bindings import NATIVE_SCOPES
from gradsplit.compile_core.torch_facts.private_parts import private
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled

_CLASSES = "classes with __torch_function__ in programs"
DisableTorchFunctionSubclass = private("torch._C:DisableTorchFunctionSubclass", _CLASSES)
is_function_enabled = private("torch._C:_is_torch_function_enabled", _CLASSES)
make_subclass = private("torch._C:TensorBase._make_subclass", _CLASSES)
DISABLED: Any = torch.nn.Parameter.__torch_function__


@functools.cache
def answers_functions(cls: type) -> bool:
    """Whether tensors of a class are asked: it says nothing of operators beneath, nor how one is made."""
    plain: Any = torch.Tensor
    known = type(cls) in (type(torch.Tensor), type(torch.nn.Parameter)) and issubclass(cls, torch.Tensor)
    same_operators = getattr(cls, "__torch_dispatch__", None) == plain.__torch_dispatch__
    return cls is not plain and known and same_operators and cls.__torch_function__ != DISABLED


def is_asked(tensor: torch.Tensor) -> bool:
    return answers_functions(type(tensor)) and not is_lazy(tensor)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is no more than a tensor, and through which gradients come whatever the mode."""
    enabled = torch.is_grad_enabled()
    set_grad_enabled(True)
    try:
        return tensor.as_subclass(torch.Tensor)
    finally:
        set_grad_enabled(enabled)


@functools.cache
def _overridable() -> frozenset[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_scope = torch.overrides.get_overridable_functions()
    return frozenset([set_grad_enabled, *(each for found in by_scope.values() for each in found)])


def is_overridable(function: Any) -> bool:
    """Whether torch may ask before a function of it runs. What reads an attribute asks where that is read."""
    if isinstance(function, types.BuiltinFunctionType):
        # Bound methods of the scope are made anew at each look-up, so they are compared by equality.
        native = any(getattr(scope, function.__name__, None) == function for scope in NATIVE_SCOPES)
        return native or function in _overridable()
    try:
        known = isinstance(function, (OpOverload, OpOverloadPacket)) or function in _overridable()
    except TypeError:
        return False
    return known and not isinstance(function, types.MethodWrapperType)


@functools.cache
def stand_in_class(cls: type) -> Any:
    """A class whose objects torch takes for those of a class that answers functions."""
    bases = (torch.Tensor,) if issubclass(cls, torch.Tensor) else ()
    return type(cls.__name__, bases, {"__torch_function__": classmethod(lambda cls, *asked: NotImplemented)})


def what_is_asked(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None] | None:
    """The function that those are asked for who answer, with positional arguments and keywords, None where there are
    none of these; None where nobody is asked."""
    try:
        with _Noting():
            function(*args, **kwargs)
    except _Asked as asked:
        public, _, *rest = asked.args
        return public, rest[0] if rest else (), rest[1] if len(rest) > 1 else None
    except Exception:
        return None
    return None


class _Asked(Exception):
    """Torch has asked."""


class _Noting(TorchFunctionMode):
    def __torch_function__(self, *asked: Any) -> Any:
        raise _Asked(*asked)
