"""``wrap_numpy``: a function of arrays as a function of tensors, which is differentiable and runs on any device."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradsplit.compile_core.capture.numpy_arrays.arrays import ArrayValue, as_array
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.structures import map_parts
from gradsplit.compile_core.capture.values.tensors import TensorValue


def wrap_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function from arrays to arrays as a function from tensors to tensors, for ``compile(fullgraph=True)``.

    Compiled, it computes on the tensors themselves, wherever they lie, and gradients flow through it. Called as plain
    Python it hands NumPy the tensors' arrays, which do neither.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = arrays_of((args, kwargs))
        return tensors_of(function(*given[0], **given[1]))

    return wrapped


def form_of_torchs_wrapper(function: Any) -> Any:
    """What ``torch.compiler.wrap_numpy`` returned as what ``wrap_numpy`` returns; None for anything else."""
    if not isinstance(function, types.FunctionType):
        return None
    place = (function.__globals__.get("__name__"), function.__code__.co_qualname)
    if place != ("torch._dynamo.external_utils", "wrap_numpy.<locals>.wrap"):
        return None
    return wrap_numpy(vars(function)["__wrapped__"])


def arrays_of(structure: Any) -> Any:
    """The structure with arrays for tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), structure)


def tensors_of(structure: Any) -> Any:
    """The structure with tensors for arrays and NumPy scalars."""
    return pytree.tree_map_only((np.ndarray, np.generic), torch.as_tensor, structure)


@answer_to(arrays_of)
def _arrays_of(state: CaptureState, structure: Value) -> Value:
    return _map(
        state, structure, lambda value: as_array(state, value) if isinstance(value, TensorValue) else value
    )


@answer_to(tensors_of)
def _tensors_of(state: CaptureState, structure: Value) -> Value:
    return _map(state, structure, lambda value: value.tensor if isinstance(value, ArrayValue) else value)


def _map(state: CaptureState, value: Value, change: Callable[[Value], Value]) -> Value:
    def part(value: Value) -> Value:
        if isinstance(value, (TensorValue, ArrayValue, ConstantValue)):
            return change(value)
        raise state.unsupported("wrap-numpy", f"{value.describe()} goes in or out of a function of arrays")

    return map_parts(state, value, part)
