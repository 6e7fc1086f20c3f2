"""Rules for the calls of functions that a program marked, and of the functions that mark; see ``directives``."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from gradsplit.compile_core.capture import directives
from gradsplit.compile_core.capture.higher_order_calls.function_transforms import TransformedValue
from gradsplit.compile_core.capture.object_model.existing_objects import CallableReferenceValue
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue, FunctionValue
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.torch_rules.torch_functions import (
    is_tensor_function,
    tensor_function_rule,
)
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, NotConstant, PlainCall, Value
from gradsplit.compile_core.capture.values.call_rules import CallRule, answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, without_attributes
from gradsplit.compile_core.torch_facts.higher_order_operators import call_of_region


def directive_rule(function: Any) -> CallRule | None:
    """The rule of a function that the program marked, None if it has no mark."""
    if directives.is_disallowed(function):
        return functools.partial(_end_graph, function)
    if getattr(function, directives.CONSTANT_RESULT, False):
        return functools.partial(_call_now, function)
    if directives.is_allowed(function):
        return _allowed_rule(function)
    if directives.is_torch_front_end_function(function, ("allow_in_graph",)):
        return _allow
    return None


def _end_graph(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    asks = directives.is_torch_front_end_function(function, ("graph_break",))
    if not asks and function is not directives.graph_break:
        name = getattr(function, "__name__", type(function).__name__)
        raise state.unsupported("disallowed", f"{name} is not allowed in graphs (disallow_in_graph)")
    if state.calling_module().startswith("torch.optim."):
        return ConstantValue(None)  # it asks for one on account of torch's own compiler
    shown = [value.value for value in (*args, *kwargs.values()) if isinstance(value, ConstantValue)]
    reason = f": {shown[0]}" if shown and shown[0] else ""
    raise state.unsupported("graph-break", f"the program asks for a graph break{reason}")


directives.disallow_in_graph(directives.graph_break)


answer_to(directives.is_compiling)(lambda state: True)


# ``torch.compiler.nested_compile_region``: captured where it is called.
answer_to(call_of_region)(lambda state, function, *args, **kwargs: function.call(state, list(args), kwargs))


@answer_to(torch.compiler.disable)
def _disable(state: CaptureState, *args: Value, **kwargs: Value) -> Value:
    raise state.unsupported(
        "disable-call", "disable() called in compiled code", "disable the function where it is defined"
    )


@answer_to(directives.allow_in_graph, torch.compiler.allow_in_graph)
def _allow(state: CaptureState, function: Value) -> Any:
    """``allow_in_graph(function)`` in captured code: the function as a value whose calls are single nodes."""
    real = real_object(state, function)
    return CallableReferenceValue(real, _allowed_rule(real), function.source)


def _allowed_rule(function: Any) -> CallRule:
    record = tensor_function_rule(_graph_target(function))

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        without_attributes(state, [*args, *kwargs.values()])
        return record(state, args, kwargs)

    return call


def _graph_target(function: Any) -> Any:
    """What stands for an allowed function in the graph.

    fx writes a function of torch by the name that it bears, and ``functools.wraps`` gives that name to other functions,
    such as ``torch.vmap(torch.sum)``; a lambda has no name at all. These get a function of their own round them.
    """
    has_own_name = isinstance(function, types.FunctionType) and function.__name__.isidentifier()
    if is_tensor_function(function) or (has_own_name and not is_library_object(function)):
        return function

    def allowed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return allowed


def _call_now(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Calls the function now; the compiled function holds on to what it returned."""
    real_args = [real_object(state, value) for value in args]
    real_kwargs = {key: real_object(state, value) for key, value in kwargs.items()}
    try:
        result = function(*real_args, **real_kwargs)
    except Exception as error:
        raise PlainCall(f"{function.__name__} raises {type(error).__name__}: {error}") from error
    return state.wrap(result, state.reference_source(function.__name__, result))


def real_object(state: CaptureState, value: Value | LazyValue) -> Any:
    """The object that a value stands for, if it exists already and the captured code has not changed it.

    A function that was made in the frame is made for real where all that it holds on to is known.
    """
    if isinstance(value, LazyValue):
        return value.real
    if isinstance(value, ReferenceValue):
        return value.real
    if isinstance(value, InstanceValue) and value.real is not None and not value.changes:
        return value.real
    if isinstance(value, TensorValue) and value.source is not None and not value.changes:
        record = next(record for record in state.graph.records if record.node is value.node)
        if value.fake._version == record.version:
            return record.real
    if isinstance(value, BoundMethodValue):
        return types.MethodType(real_object(state, value.function), real_object(state, value.owner))
    if isinstance(value, TransformedValue):
        return value.transform(real_object(state, value.function), **value.options)
    if isinstance(value, FunctionValue):
        return value.real if value.real is not None else _real_function(state, value)
    try:
        return value.as_constant()
    except NotConstant:
        raise state.unsupported(
            "no-real-object", f"{value.describe()} does not exist before the call"
        ) from None


def _real_function(state: CaptureState, value: FunctionValue) -> types.FunctionType:
    cells = []
    for cell in value.closure:
        if cell.content is None:
            raise state.unsupported("no-real-object", f"{value.describe()} has an empty closure cell")
        cells.append(cell.real or types.CellType(real_object(state, cell.content)))
    defaults = tuple(real_object(state, item) for item in value.defaults)
    made = types.FunctionType(value.code, value.scope, value.code.co_name, defaults, tuple(cells))
    made.__kwdefaults__ = {
        key: real_object(state, item) for key, item in value.keyword_defaults.items()
    } or None
    return made
