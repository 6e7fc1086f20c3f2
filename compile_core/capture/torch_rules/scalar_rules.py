"""Which numbers that depend on data become nodes of the graph.

Reading a number out of a tensor ends the graph in a user's code, where control flow tends to depend on it, unless
``config.capture_scalar_outputs`` is on, or an integer only decides whether to raise. Floats are then computed with as
the program does (``open_numbers/scalars``); integers and truth values are symbols, of which tensors may have as many
elements. Some code of torch reads numbers only to compute with them: step counts in optimizers, the number of batches
in the moving averages of a normalisation.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.open_numbers.conditions import assumed, expected_of
from gradsplit.compile_core.capture.open_numbers.drawn_ends import ends_of_draw
from gradsplit.compile_core.capture.open_numbers.known_numbers import constant_in, decision_by
from gradsplit.compile_core.capture.open_numbers.scalars import (
    ScalarValue,
    compute_scalar,
    only_computes,
    read_scalar,
)
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ListValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule


def reads_scalars(state: CaptureState, tensor: TensorValue) -> bool:
    """Whether the code that runs is known, or said, to compute with what it reads, or it is drawn: then what the
    program decides by it may be no decision."""
    if only_computes(state):
        return True
    is_float = tensor.fake.dtype.is_floating_point and tensor.fake.numel() == 1
    return is_float and (ends_of_draw(tensor.node) is not None or state.keeps_numbers())


def _reads_symbols(state: CaptureState, tensor: TensorValue, decides: bool = False) -> bool:
    dtype = tensor.fake.dtype
    is_exact = not dtype.is_floating_point and not dtype.is_complex
    return is_exact and tensor.fake.numel() == 1 and (state.only_checks or state.keeps_numbers(not decides))


def _constant_in(state: CaptureState, tensor: TensorValue) -> Any:
    """The number in a tensor that the program makes of nothing but constants."""
    known = getattr(tensor.fake, "constant", None)
    return constant_in(state, tensor.node) if known is None else known.item()


@method_rule("item")
def _item(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    if args or kwargs:
        return None
    made = _constant_in(state, tensor)
    if made is not None:
        return ConstantValue(made)
    if tensor.fake.dtype is torch.bool and tensor.fake.numel() == 1:
        return _truth(state, tensor, decides=False)
    if reads_scalars(state, tensor):
        return read_scalar(state, tensor)
    is_read = _reads_symbols(state, tensor)
    return state.call_torch("item", tensor) if is_read else None


@method_rule("__bool__")
def _truth(state: CaptureState, tensor: TensorValue, decides: bool = True) -> Value | None:
    made = _constant_in(state, tensor)
    if made is not None:
        return ConstantValue(bool(made))
    known = decision_by(state, tensor.node, bool, f"bool({tensor.describe()})")
    if known is not None:
        return ConstantValue(known)
    if decides and (known := assumed(state, tensor, expected_of(tensor.node))) is not None:
        return ConstantValue(known)
    return state.read_truth(tensor) if _reads_symbols(state, tensor, decides) else None


@method_rule("__float__")
def _float(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    made = _constant_in(state, tensor)
    if made is not None:
        return ConstantValue(float(made))
    return (
        compute_scalar(state, float, [read_scalar(state, tensor)]) if reads_scalars(state, tensor) else None
    )


@method_rule("__int__")
def _int(state: CaptureState, tensor: TensorValue) -> Value | None:
    if not (state.only_checks or state.keeps_numbers()):
        return None
    read = _item(state, tensor)
    return None if read is None else CALL_RULES[int](state, [read], {})


@method_rule("__index__")
def _index(state: CaptureState, tensor: TensorValue) -> Value | None:
    is_integer = _reads_symbols(state, tensor) and tensor.fake.dtype is not torch.bool
    return _item(state, tensor) if is_integer else None


@method_rule("tolist")
def _list(state: CaptureState, tensor: TensorValue) -> Value | None:
    if isinstance(tensor.fake.numel(), torch.SymInt) or not state.keeps_numbers():
        return None
    if tensor.fake.dim() == 0:
        return _item(state, tensor)
    parts = state.items_of(tensor)
    found = [_list(state, part) for part in parts if isinstance(part, TensorValue)]
    return None if None in found else ListValue([part for part in found if part is not None])


def _tensor_of(function: Any) -> CallRule:
    """Of such a number: these functions ask fake tensors for its value."""
    recorded = CALL_RULES[function]

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if not args or not isinstance(args[0], ScalarValue):
            return recorded(state, args, kwargs)
        dtype = torch.get_default_dtype() if isinstance(args[0].example, float) else torch.int64
        return state.call_torch(torch.full, (), *args, **{"dtype": dtype, **kwargs})

    return call


CALL_RULES.update({function: _tensor_of(function) for function in (torch.tensor, torch.as_tensor)})
