"""Which numbers that depend on data become nodes of the graph.

Reading a number out of a tensor ends the graph in a user's code, where control flow tends to depend on it, unless
``config.capture_scalar_outputs`` is on and it is a float. Some code of torch reads numbers only to compute with them:
step counts in optimizers, the number of batches in the moving averages of a normalisation.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core import config
from gradsplit.compile_core.capture.open_numbers.known_numbers import decision_by
from gradsplit.compile_core.capture.open_numbers.scalars import ScalarValue, compute_scalar, read_scalar
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule

_MODULES = ("torch.optim.", "torch.nn.modules.batchnorm")


def reads_scalars(state: CaptureState, tensor: TensorValue) -> bool:
    """Whether the code that runs is known, or said, to compute with what it reads."""
    said = config.capture_scalar_outputs and tensor.fake.dtype.is_floating_point and tensor.fake.numel() == 1
    return state.calling_module().startswith(_MODULES) or said


@method_rule("item")
def _item(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    return read_scalar(state, tensor) if reads_scalars(state, tensor) and not args and not kwargs else None


@method_rule("__bool__")
def _truth(state: CaptureState, tensor: TensorValue) -> Value | None:
    known = decision_by(state, tensor.node, bool, f"bool({tensor.describe()})")
    return None if known is None else ConstantValue(known)


@method_rule("__float__")
def _float(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    return (
        compute_scalar(state, float, [read_scalar(state, tensor)]) if reads_scalars(state, tensor) else None
    )


def _tensor_of(function: Any) -> CallRule:
    """Of such a number: these functions ask fake tensors for its value."""
    recorded = CALL_RULES.get(function)

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if not args or not isinstance(args[0], ScalarValue):
            if recorded is not None:
                return recorded(state, args, kwargs)
            return state.call_tensor_op("call_function", function, args, kwargs)
        dtype = torch.get_default_dtype() if isinstance(args[0].example, float) else torch.int64
        shape: list[Any] = [SequenceValue([], tuple), *args]
        return state.call_tensor_op(
            "call_function", torch.full, shape, {"dtype": ConstantValue(dtype), **kwargs}
        )

    return call


CALL_RULES.update({function: _tensor_of(function) for function in (torch.tensor, torch.as_tensor)})
