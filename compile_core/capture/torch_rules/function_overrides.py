"""``__torch_function__`` of classes and of modes, in captured code.

Torch tells what it asks for a call (``torch_facts/function_overrides``), made with empty tensors. Classes and modes of
the program then answer as the Python that they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.object_model.overriding_tensors import OverridingTensor
from gradsplit.compile_core.capture.torch_rules.modes import ModeValue
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.sets import SetValue
from gradsplit.compile_core.capture.values.structures import leaves, map_parts
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule
from gradsplit.compile_core.torch_facts.function_overrides import (
    DISABLED,
    DisableTorchFunctionSubclass,
    answers_functions,
    make_subclass,
    stand_in_class,
    what_is_asked,
)

Keywords = dict[str, Value]


class _StandIns:
    """Real arguments in the place of symbolic ones, and back."""

    def __init__(self, state: CaptureState) -> None:
        self.state = state
        self._values: dict[int, tuple[Any, Value]] = {}

    def real(self, value: Value) -> Any:
        if isinstance(value, SequenceValue) and value.cls in (tuple, list):
            return value.cls(map(self.real, value.all(self.state)))
        if isinstance(value, SliceValue):
            return slice(*map(self.real, value.parts))
        made = self._made(value)
        self._values[id(made)] = made, value
        return made

    def _made(self, value: Value) -> Any:
        if isinstance(value, TensorValue):
            return torch.empty(0)
        if overrides(value):
            cls = stand_in_class(value.python_type())
            return torch.empty(0).as_subclass(cls) if isinstance(value, OverridingTensor) else cls()
        try:
            number = getattr(value, "number", None)  # an open one stays so
            return value.as_constant() if number is None else number
        except NotConstant:
            return object()

    def value(self, real: Any) -> Value:
        found = self._values.get(id(real))
        if found is not None:
            return found[1]
        if type(real) is tuple or type(real) is list:
            items: list[Any] = [self.value(item) for item in real]
            return ListValue(items) if type(real) is list else SequenceValue(items, tuple)
        if type(real) is slice:
            return SliceValue([self.value(part) for part in (real.start, real.stop, real.step)])
        return self.state.from_constant(real)


def overrides(value: Value) -> bool:
    """Whether a class of the program answers for an object of it."""
    cls = value.python_type() if isinstance(value, InstanceValue) else object
    return getattr(cls, "__torch_function__", DISABLED) != DISABLED


def through_overrides(
    state: CaptureState,
    function: Any,
    args: list[Value],
    kwargs: Keywords,
    plain: Callable[[list[Value], Keywords], Value],
) -> Value:
    """A call of a function of torch: what those answer that it asks, or else ``plain`` of the tensors that lie in the
    graph."""
    involved = list(filter(overrides, leaves(state, [*args, *kwargs.values()])))
    if state.modes_see or (involved and not state.functions_disabled):
        found = _asked(state, function, args, kwargs, involved)
        if found is not None:
            return found
    if not involved:
        return plain(args, kwargs)
    held = {id(value.tensor): value for value in reversed(involved) if isinstance(value, OverridingTensor)}

    def strip(value: Value) -> Value:
        return value.tensor if isinstance(value, OverridingTensor) else value

    given = [map_parts(state, value, strip) for value in args]
    result = plain(given, {key: map_parts(state, value, strip) for key, value in kwargs.items()})
    return held.get(id(result), result)  # what is changed in place is given back


def _asked(
    state: CaptureState, function: Any, args: list[Value], kwargs: Keywords, involved: list[Value]
) -> Value | None:
    """The answer; None where torch does not ask."""
    stand_ins = _StandIns(state)
    given = [stand_ins.real(value) for value in args]
    named = {key: stand_ins.real(value) for key, value in kwargs.items()}
    found = what_is_asked(function, given, named)
    if found is None:
        return None
    public, arguments, keywords = found
    if isinstance(function, types.FunctionType) and public is not function:
        # It is Python, and asks for parts of what it does.
        return state.wrap(function, None).call(state, args, kwargs)
    passed = [stand_ins.value(arguments)]
    if keywords is not None:
        passed.append(state.from_constant({key: stand_ins.value(item) for key, item in keywords.items()}))
    return answer(state, state.wrap(public, None), involved, passed)


def answer(state: CaptureState, function: Value, involved: list[Value], passed: list[Value]) -> Value | None:
    """What the innermost mode answers, else the objects, those of subclasses first; None where there is nobody."""
    order: list[Value] = []
    for value in involved if not state.functions_disabled else ():
        cls = value.python_type()
        if all(cls is not other.python_type() for other in order):
            behind = (at for at, other in enumerate(order) if issubclass(cls, other.python_type()))
            order.insert(next(behind, len(order)), value)
    kinds = SequenceValue([state.wrap(value.python_type(), None) for value in order], tuple)

    def ask(value: Value) -> Value | None:
        asked = value.get_attribute(state, "__torch_function__")
        result = asked.call(state, [function, kinds, *passed], {})
        return None if result.python_type() is type(NotImplemented) else result

    found = None
    if state.modes_see:
        innermost = state.function_modes.pop()
        try:
            found = ask(innermost[0])
        finally:
            state.function_modes.append(innermost)
    elif not order:
        return None
    found = found or next(filter(None, map(ask, order)), None)
    if found is not None:
        return found
    raise state.unsupported("torch-function", f"nobody who is asked implements {function.describe()}")


def _has(state: CaptureState, *values: Value) -> bool:
    return state.modes_see or (not state.functions_disabled and any(map(overrides, values)))


answer_to(torch.overrides.has_torch_function)(lambda state, values: _has(state, *state.items_of(values)))
answer_to(torch.overrides.has_torch_function_unary, torch.overrides.has_torch_function_variadic)(_has)


@answer_to(torch.overrides.handle_torch_function)
def _handle(state: CaptureState, public: Value, relevant: Value, *args: Value, **kwargs: Value) -> Any:
    passed = [state.from_constant(args), state.from_constant(kwargs)]
    return answer(state, public, list(filter(overrides, state.items_of(relevant))), passed)


@answer_to(torch.overrides.get_default_nowrap_functions)
def _not_converted(state: CaptureState) -> Value:
    found = torch.overrides.get_default_nowrap_functions()
    return SetValue({each: ReferenceValue(each) for each in found})


class _Disabled(ModeValue):
    cls = DisableTorchFunctionSubclass
    is_unseen = True

    def enter(self, state: CaptureState) -> None:
        state.functions_disabled += 1
        state.entered_modes.append(self)

    def leave(self, state: CaptureState) -> None:
        state.functions_disabled -= 1
        state.entered_modes.remove(self)


answer_to(DisableTorchFunctionSubclass)(lambda state: _Disabled())


@method_rule("as_subclass")
def as_subclass(state: CaptureState, tensor: TensorValue, cls: Value) -> Value:
    real = cls.real if isinstance(cls, ClassValue) else object
    if real is torch.Tensor:
        return state.call_torch("view_as", tensor, tensor)
    if not answers_functions(real):
        raise state.unsupported("tensor-subclass", f"{tensor.describe()} as {cls.describe()}")
    state.overriding = True
    return OverridingTensor(real, tensor)


@answer_to(torch.Tensor.__new__)
def _new(state: CaptureState, cls: Value, data: Value) -> Value:
    if not isinstance(data, TensorValue):
        raise state.unsupported("tensor-subclass", f"{cls.describe()} made of {data.describe()}")
    return as_subclass(state, data, cls)


@answer_to(make_subclass)
def _make_subclass(state: CaptureState, cls: Value, data: Value, require_grad: Value | None = None) -> Value:
    if not isinstance(data, TensorValue) or (require_grad is not None and require_grad.truth(state)):
        raise state.unsupported("tensor-subclass", f"a leaf that is {cls.describe()}")
    return _new(state, cls, data.call_method(state, "detach", [], {}))
