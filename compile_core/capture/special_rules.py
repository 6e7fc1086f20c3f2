"""Rules that need the frame they are called from, and rules for special functions of libraries."""

from __future__ import annotations

from typing import Any

from compile_core.capture import (
    attribute_rules,
    autograd_functions,
    builtin_rules,
    checkpoints,
    control_flow,
    copy_rules,
    function_transforms,
    functional_calls,
    inspect_rules,
    modes,
    numpy_rules,
    numpy_wrapper,
    switches,
    tensor_rules,
)
from compile_core.capture.base import CaptureState, Value
from compile_core.capture.call_rules import call_rule
from compile_core.capture.classes import ClassValue, SuperValue
from compile_core.capture.frame import Frame


@call_rule(super)
def _super(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if args:
        cls, owner = args
    else:
        frame = state.frames[-1]
        assert isinstance(frame, Frame)
        cell = frame.cells.get("__class__")
        if cell is None or cell.content is None:
            raise state.unsupported("super", "super() outside of a method")
        cls = state.realize(cell.content)
        first = frame.code.code.co_varnames[0]
        content = frame.cells[first].content if first in frame.cells else frame.locals[first]
        owner = None if content is None else state.realize(content)
    if not isinstance(cls, ClassValue) or owner is None:
        raise state.unsupported("super", "super() of something else than a class")
    return SuperValue(cls.real, owner)


# Named by the state, so that importing it registers these rules and those of the files.
SPECIAL_RULES: tuple[Any, ...] = (
    attribute_rules,
    autograd_functions,
    builtin_rules,
    checkpoints,
    control_flow,
    copy_rules,
    function_transforms,
    functional_calls,
    inspect_rules,
    modes,
    numpy_rules,
    numpy_wrapper,
    switches,
    tensor_rules,
    _super,
)
