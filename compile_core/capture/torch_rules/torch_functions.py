"""Torch functions: which are recorded in the graph, which are answered at once, which change a mode."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch.nn import functional

from gradsplit.compile_core.capture.torch_rules.global_state import attention_kernels
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import (
    CALL_RULES,
    CallRule,
    answer_to,
    call_rule,
    fold_rule,
)
from gradsplit.compile_core.capture.values.constants import as_value
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, refuse_unseen
from gradsplit.compile_core.torch_facts.bindings import NATIVE_SCOPES, is_scripting
from gradsplit.compile_core.torch_facts.thread_state import (
    get_tracing_state,
    number_of_dispatch_modes,
    privateuse1_backend_name,
)

# Overridable, but their results are Python values, or they do more than compute, or share memory without saying so.
_NOT_OPERATIONS = frozenset(
    [
        *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "allclose", "equal", "is_nonzero"),
        "numel",
    ]
)


@functools.cache
def _tensor_functions() -> frozenset[Any]:
    """Every function of Python that is a node of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_scope = torch.overrides.get_overridable_functions()
    functions = (each for scope, found in by_scope.items() if scope is not torch.Tensor for each in found)
    return frozenset(each for each in functions if getattr(each, "__name__", "") not in _NOT_OPERATIONS)


# Generated bindings of native operators. A result that is not a tensor is refused when it is recorded.
_NOT_NATIVE_OPERATIONS = ("from_file", "frombuffer", "_cufft", "_use_cudnn", "_debug", "_print", "set_")


def is_tensor_function(function: Any) -> bool:
    if isinstance(function, types.BuiltinFunctionType):
        name = function.__name__
        if not name.startswith(_NOT_NATIVE_OPERATIONS) and name not in _NOT_OPERATIONS:
            # Bound methods of the scope are made anew at each look-up, so they are compared by equality.
            return any(getattr(scope, name, None) == function for scope in NATIVE_SCOPES)
        return False
    try:
        return function in _tensor_functions()
    except TypeError:
        return False


def tensor_function_rule(function: Any) -> CallRule:
    """The rule that records a call of a tensor function."""

    def record(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if function is functional.scaled_dot_product_attention:
            state.guards.gives(attention_kernels, state.attention_at_start, "the kernels of attention")
        return state.call_tensor_op("call_function", function, args, kwargs)

    return record


def _call_method(name: str, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """``torch.Tensor.name`` called as a function."""
    owner, *rest = args
    if not isinstance(owner, TensorValue):
        raise TypeError(f"torch.Tensor.{name} of {owner.describe()}")
    return owner.call_method(state, name, rest, kwargs)


# Operators by name, as ``torch.ops.aten.add`` and ``torch.ops.aten.add.Tensor``, and those that a program registered.
_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)


def find_torch_rule(function: Any) -> CallRule | None:
    """The rule of a torch callable, None where there is none."""
    described = getattr(function, "__self__", None)
    if isinstance(function, types.MethodWrapperType) and isinstance(described, types.GetSetDescriptorType):
        return _ATTRIBUTE_RULES[function.__name__](described.__name__)
    if is_tensor_function(function) or isinstance(function, _OPERATORS):
        return tensor_function_rule(function)
    if isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        owner = function.__objclass__
        if owner is not object and issubclass(torch.Tensor, owner):
            return functools.partial(_call_method, function.__name__)
    return None


# ``torch.Tensor.shape.__get__`` called as a function, as classes that answer for functions do.
_ATTRIBUTE_RULES: dict[str, Callable[[str], CallRule]] = {
    "__get__": lambda name: lambda state, args, kwargs: args[0].get_attribute(state, name),
    "__set__": lambda name: lambda state, args, kwargs: as_value(args[0].set_attribute(state, name, args[1])),
}


_PURE = (
    *(torch.promote_types, torch.can_cast, torch.broadcast_shapes),
    torch.Size.numel,
)


@call_rule(torch.device)
def _device(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    refuse_unseen(state, torch.device)
    return fold_rule(torch.device)(state, args, kwargs)


@answer_to(torch.Size)
def _size(state: CaptureState, sizes: Value) -> Value:
    items = state.items_of(sizes)
    if any(item.python_type() is not int for item in items):
        return fold_rule(torch.Size)(state, [sizes], {})
    return SequenceValue([*items], torch.Size)


# Global state that every check guards, so its value at capture (with the captured changes) is the answer.
_STATE_QUERIES = (
    *(torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_default_dtype),
    *(torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled),
    *(get_tracing_state, privateuse1_backend_name),
)
CALL_RULES.update({function: fold_rule(function) for function in (*_PURE, *_STATE_QUERIES)})


_OF_SCRIPTS = (is_scripting, *(getattr(torch.jit, name) for name in ("is_scripting", "is_tracing")))
answer_to(*_OF_SCRIPTS)(lambda state, *args, **kwargs: False)

# Calls under such a mode run as plain Python.
answer_to(number_of_dispatch_modes)(lambda state: 0)
answer_to(torch.is_inference_mode_enabled)(lambda state: state.inference_mode)
answer_to(torch.is_tensor)(lambda state, value: isinstance(value, TensorValue))
