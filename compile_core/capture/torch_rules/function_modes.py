"""Modes that see every call of torch's functions; what those of the program answer is in ``function_overrides``.

Under the one by which masks and scores of attention index tensors, ``tensor[i]`` with a tensor ``i`` without dims takes
no number out of ``i``, which ``vmap`` could not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.structures import leaves
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.torch_facts.thread_state import pop_function_mode, push_function_mode

_BY_TENSORS = ("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex")


@answer_to(push_function_mode)
def _push(state: CaptureState, mode: Value) -> Any:
    cls = mode.python_type()
    read = _index_by_tensors if (cls.__module__, cls.__qualname__) == _BY_TENSORS else None
    if any((other is None) != (read is None) for _, other in state.function_modes):
        raise state.unsupported("torch-function-mode", f"{mode.describe()} beside a mode of another kind")
    state.function_modes.append((mode, read))
    state.overriding = True


@answer_to(TorchDispatchMode.__enter__)
def _enter_dispatch_mode(state: CaptureState, mode: Value) -> Any:
    raise state.unsupported("torch-dispatch-mode", f"{mode.describe()}, which sees every operator that runs")


@call_rule(pop_function_mode)
def _pop(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if args or kwargs or not state.function_modes:
        raise state.unsupported("torch-function-mode", "the end of a mode that the capture has not entered")
    mode, _ = state.function_modes.pop()
    return mode


@contextmanager
def indexing_by_tensors(state: CaptureState) -> Iterator[None]:
    """Inside, what the capture runs indexes as under the mode."""
    state.function_modes.append((ConstantValue(None), _index_by_tensors))
    try:
        yield
    finally:
        state.function_modes.pop()


def _index_by_tensors(state: CaptureState, tensor: TensorValue, key: Value) -> Value | None:
    """The item by indices that are all tensors and integers; None for other keys."""
    indices = list(leaves(state, [key]))
    if not all(isinstance(index, TensorValue) or issubclass(index.python_type(), int) for index in indices):
        return None
    device = tensor.fake.device
    given = (
        index
        if isinstance(index, TensorValue)
        else state.call_torch(torch.tensor, index, dtype=torch.int64, device=device)
        for index in indices
    )
    return state.call_torch(torch.ops.aten.index.Tensor, tensor, tuple(given))
