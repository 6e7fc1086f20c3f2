"""Rules for the functions of NumPy, and for the ways between arrays and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradsplit.compile_core.capture.numpy_arrays.arrays import (
    ArrayValue,
    as_array,
    call_numpy,
    constant_dtype,
    refuse_view_copy,
)
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, answer_to
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule
from gradsplit.compile_core.ir.numpy_calls import DTYPES, torch_numpy

# Their results are Python values, types or indices, or they draw numbers from another generator than NumPy's.
_NOT_MAPPED = frozenset(
    [
        "cbrt", "modf",
        "allclose", "array_equal", "array_equiv", "can_cast", "common_type", "copyto", "dtype", "empty", "empty_like",
        "finfo", "from_dlpack", "generic", "iinfo", "indices", "iscomplexobj", "isrealobj", "isscalar", "issubdtype",
        "min_scalar_type", "ndarray", "ndim", "put", "put_along_axis", "resize", "result_type", "row_stack", "shape",
        "size", "fill_diagonal", "uint16", "uint32", "uint64", "ulonglong",
    ]
)  # fmt: skip


def _rule(name: str) -> CallRule:
    return lambda state, args, kwargs: call_numpy(state, name, args, kwargs)


_ELEMENT_TYPES = frozenset(dtype.type for dtype in DTYPES)


def _register(module: Any, stand_in: Any, prefix: str) -> None:
    for name in dir(stand_in):
        function = getattr(module, name, None)
        other_type = isinstance(function, type) and function not in _ELEMENT_TYPES
        if name.startswith("_") or name in _NOT_MAPPED or not callable(function) or other_type:
            continue
        if callable(getattr(stand_in, name)):
            CALL_RULES[function] = _rule(prefix + name)


_register(np, torch_numpy, "")
_register(np.linalg, torch_numpy.linalg, "linalg.")
_register(np.fft, torch_numpy.fft, "fft.")


def _metadata_rule(function: Any) -> CallRule:
    def answer(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        (array,) = args
        if not isinstance(array, ArrayValue):
            raise TypeError("the argument is no array")
        stand_in = np.empty(tuple(array.tensor.fake.shape), array.dtype)
        return state.from_constant(function(stand_in))

    return answer


for _function in (np.ndim, np.shape, np.size, np.iscomplexobj, np.isrealobj):
    CALL_RULES[_function] = _metadata_rule(_function)


answer_to(np.dtype)(lambda state, kind: np.dtype(constant_dtype(kind)))


@method_rule("numpy")
def _numpy(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    lazy = tensor.fake.is_conj() or tensor.fake.is_neg()
    if args or kwargs or lazy or tensor.fake.requires_grad or tensor.fake.device.type != "cpu":
        raise state.unsupported(
            "tensor-to-array", f"the array of {tensor.describe()}, which torch may refuse"
        )
    return as_array(state, tensor)


@answer_to(torch.from_numpy)
def _from_numpy(state: CaptureState, array: Value) -> Any:
    if not isinstance(array, ArrayValue) or array.cls is not np.ndarray:
        raise TypeError("the argument is no array")
    refuse_view_copy(state, array)
    # Another tensor object with the same memory, as torch makes one at every call.
    return state.call_tensor_op("call_method", "view_as", [array.tensor, array.tensor], {})


def _tensor_of(function: Any) -> CallRule:
    recorded = CALL_RULES.get(function)

    def make(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        for value in args:
            if isinstance(value, ArrayValue):
                refuse_view_copy(state, value)
        given = [value.tensor if isinstance(value, ArrayValue) else value for value in args]
        if any(isinstance(value, SequenceValue) and _holds_arrays(state, value) for value in args):
            return _refuse(state)
        if function is torch.tensor and any(isinstance(value, ArrayValue) for value in args):
            # It copies; given a tensor torch would warn that there are better ways.
            return state.call_tensor_op("call_method", "clone", given, {}) if not kwargs else _refuse(state)
        if recorded is not None:
            return recorded(state, given, kwargs)
        return state.call_tensor_op("call_function", function, given, kwargs)

    return make


def _holds_arrays(state: CaptureState, value: Value) -> bool:
    if isinstance(value, SequenceValue):
        return any(_holds_arrays(state, item) for item in value.all(state))
    return isinstance(value, ArrayValue)


def _refuse(state: CaptureState) -> Value:
    raise state.unsupported("tensor-of-array", "a tensor made of arrays in a list, or with further arguments")


@method_rule("new_tensor")
def _new_tensor(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    if any(_holds_arrays(state, value) for value in args):
        return _refuse(state)
    return None


for _function in (torch.tensor, torch.as_tensor, torch.asarray):
    CALL_RULES[_function] = _tensor_of(_function)
