"""Torch functions: which are recorded in the graph, which are answered at once, which change a mode."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch
import torch.overrides
from torch import _jit_internal
from torch.nn import functional

from gradsplit.compile_core.capture.torch_rules.global_state import attention_kernels
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue

# Functions that make tensors; they take none, so torch does not list them as overridable.
_FACTORIES = [
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
]

# Overridable, but their results are Python values, or they do more than compute, or share memory without saying so.
_NOT_OPERATIONS = frozenset(
    [
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "allclose",
        "equal",
        "is_nonzero",
        "save",
        "load",
        "compile",
        "typename",
        "numel",
        "is_tensor",
        "is_storage",
        "set_default_tensor_type",
        "get_default_dtype",
        "unify_type_list",
    ]
)


@functools.cache
def _tensor_functions() -> frozenset[Any]:
    """Every function that is a node of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_scope = torch.overrides.get_overridable_functions()
    found: set[Any] = set()
    for scope, functions in by_scope.items():
        if scope is torch.Tensor:
            continue
        for function in functions:
            name = getattr(function, "__name__", "")
            if name not in _NOT_OPERATIONS:
                found.add(function)
    found.update(getattr(torch, name) for name in _FACTORIES)
    for name in ("scaled_dot_product_attention", "one_hot", "pad", "linear", "gelu"):
        found.add(getattr(functional, name))
    return frozenset(found)


# Generated bindings of native operators. A result that is not a tensor is refused when it is recorded.
_NATIVE_SCOPES = tuple(
    getattr(torch._C, name) for name in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special")
)
_NOT_NATIVE_OPERATIONS = ("from_file", "frombuffer", "_cufft", "_use_cudnn", "_debug", "_print", "set_")


def is_tensor_function(function: Any) -> bool:
    if isinstance(function, types.BuiltinFunctionType):
        name = function.__name__
        if not name.startswith(_NOT_NATIVE_OPERATIONS) and name not in _NOT_OPERATIONS:
            # Bound methods of the scope are made anew at each look-up, so they are compared by equality.
            return any(getattr(scope, name, None) == function for scope in _NATIVE_SCOPES)
        return False
    try:
        return function in _tensor_functions()
    except TypeError:
        return False


def tensor_function_rule(function: Any) -> CallRule:
    """The rule that records a call of a tensor function."""

    def record(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if function is functional.scaled_dot_product_attention:
            state.guards.add(
                [],
                "{c0}() == {c1}",
                [attention_kernels, state.attention_at_start],
                "the kernels of attention",
            )
        return state.call_tensor_op("call_function", function, args, kwargs)

    return record


def tensor_method_rule(name: str) -> CallRule:
    """The rule of ``torch.Tensor.name`` called as a function."""

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        owner, *rest = args
        if not isinstance(owner, TensorValue):
            raise TypeError(f"torch.Tensor.{name} of {owner.describe()}")
        return owner.call_method(state, name, rest, kwargs)

    return call


# Operators by name, as ``torch.ops.aten.add`` and ``torch.ops.aten.add.Tensor``, and those that a program registered.
_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)


def find_torch_rule(function: Any) -> CallRule | None:
    """The rule of a torch callable, None where there is none."""
    if function in CALL_RULES:
        return CALL_RULES[function]
    if is_tensor_function(function) or isinstance(function, _OPERATORS):
        return tensor_function_rule(function)
    if isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        owner = function.__objclass__
        if owner is not object and issubclass(torch.Tensor, owner):
            return tensor_method_rule(function.__name__)
    return None


# Pure functions of metadata: with tensors they read the fake.
_METADATA_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj)


def _metadata_rule(function: Any) -> CallRule:
    def answer(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        (tensor,) = args
        if not isinstance(tensor, TensorValue):
            raise TypeError("the argument is not a tensor")
        return state.from_constant(function(tensor.fake))

    return answer


CALL_RULES.update({function: _metadata_rule(function) for function in _METADATA_FUNCTIONS})

_PURE = (
    torch.promote_types,
    torch.can_cast,
    torch.broadcast_shapes,
    torch.device,
    torch.Size,
    torch.Size.numel,
)


def _fold_rule(function: Any) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return fold(state, function, args, kwargs)

    return call


CALL_RULES.update({function: _fold_rule(function) for function in _PURE})

# Global state that every check guards, so its value at capture (with the captured changes) is the answer.
_STATE_QUERIES = (
    torch.is_grad_enabled,
    torch.is_autocast_enabled,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch._C._get_tracing_state,
    torch._C._get_privateuse1_backend_name,
)
CALL_RULES.update({function: _fold_rule(function) for function in _STATE_QUERIES})


_SCRIPTING_QUERIES = ("is_scripting", "is_tracing")


def _answer(value: Any) -> CallRule:
    def answer(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return ConstantValue(value)

    return answer


for _function in (_jit_internal.is_scripting, *(getattr(torch.jit, name) for name in _SCRIPTING_QUERIES)):
    CALL_RULES[_function] = _answer(False)
for _function in (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
):
    CALL_RULES[_function] = _answer(False)


@call_rule(torch.is_inference_mode_enabled)
def _is_inference_mode_enabled(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ConstantValue(state.inference_mode)


@call_rule(torch.is_tensor)
def _is_tensor(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    return ConstantValue(isinstance(value, TensorValue))


@call_rule(torch._assert)
def _assert(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    condition, message = args
    if condition.truth(state):
        return ConstantValue(None)
    raise state.raise_exception(AssertionError, message.as_constant())


class NumberLimits(ReferenceValue):
    """``torch.finfo`` or ``torch.iinfo`` of a dtype."""

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        try:
            return ConstantValue(getattr(self.real, name))
        except AttributeError as error:
            raise state.raise_exception(AttributeError, str(error)) from None


def _limits_rule(cls: type) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        real = [argument.as_constant() for argument in args]
        named = {name: argument.as_constant() for name, argument in kwargs.items()}
        try:
            return NumberLimits(cls(*real, **named))
        except TypeError as error:
            raise state.raise_exception(TypeError, str(error)) from None

    return call


for _limits in (torch.finfo, torch.iinfo):
    CALL_RULES[_limits] = _limits_rule(_limits)
