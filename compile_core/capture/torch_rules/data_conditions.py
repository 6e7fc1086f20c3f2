"""What a program says of numbers that depend on data, and asks: ``torch._check`` and its kin, ``guard_or_false``.

What is said becomes known to the ShapeEnv, and a check in the graph (``graph/data_sizes``). Where it fails the call is
made again as plain Python, which raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes

from gradsplit.compile_core.capture.open_numbers.conditions import ConditionValue
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicInt
from gradsplit.compile_core.capture.values.base import CaptureState, PlainCall, Value
from gradsplit.compile_core.capture.values.call_rules import rule_of_each
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.torch_facts.symbolic_numbers import SAYING

_ASKED = ("guard_or_false", "guard_or_true", "statically_known_true")
_COMPUTED = ("sym_max", "sym_min", "sym_not", "sym_ite")


def _number(value: Value) -> Any:
    if isinstance(value, (ConditionValue, SymbolicInt)):
        return value.number
    return value.as_constant()


@rule_of_each(*SAYING)
def _say(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    given = [_number(value) for value in args[:1]]
    named = {key: _number(value) for key, value in kwargs.items() if key != "message"}
    try:
        function(*given, **named)
    except Exception as error:
        # With the program's message, which may be a function of its own.
        raise PlainCall(f"{function.__name__} raises {type(error).__name__}") from error
    state.graph.write_checks()
    return ConstantValue(None)


@rule_of_each(
    *(getattr(symbolic_shapes, name) for name in _ASKED), *(getattr(torch, name) for name in _COMPUTED)
)
def _compute(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return state.from_constant(function(*map(_number, args)))
