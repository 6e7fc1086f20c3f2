"""Rules for calls of Python's built-in functions and types."""

from __future__ import annotations

import collections
import typing
from typing import Any

from gradsplit.compile_core.capture.frames.frame import Frame
from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.classes import ClassValue, SuperValue
from gradsplit.compile_core.capture.object_model.exceptions import KEEP_ARGUMENTS, ExceptionValue
from gradsplit.compile_core.capture.object_model.existing_objects import CallableReferenceValue
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue, FunctionValue
from gradsplit.compile_core.capture.object_model.made_classes import make_by_type
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.object_model.partials import PartialValue
from gradsplit.compile_core.capture.open_numbers.conditions import ConditionValue
from gradsplit.compile_core.capture.operations import texts
from gradsplit.compile_core.capture.python_rules.builtin_methods import fill
from gradsplit.compile_core.capture.values.base import NULL, CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, answers, call_rule, rule_of_each
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.mappings import DictValue, new_dict
from gradsplit.compile_core.capture.values.sets import SetValue, as_set, new_set
from gradsplit.compile_core.capture.values.tensors import METHOD_RULES, TensorValue


@answer_to(len)
def _len(state: CaptureState, value: Value) -> Any:
    if isinstance(value, TensorValue) and value.fake.dim() and not state.modes_see:
        return state.from_constant(value.fake.shape[0])
    return ConstantValue(value.length(state))


@call_rule(str)
def _str(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if len(args) == 1 and not kwargs:
        return texts.text(state, args[0])
    return fold(state, str, args, kwargs)


answers(
    {
        repr: lambda state, value: texts.representation(state, value),
        ascii: lambda state, value: texts.converted(state, value, ascii),
        type: lambda state, value, *rest: (
            make_by_type(state, [value, *rest]) if rest else state.wrap(value.python_type(), None)
        ),
    }
)


@call_rule(format)
def _format(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    value, spec = [*args, ConstantValue("")][:2]
    return texts.formatted(state, value, spec)


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
        content = frame.variable(frame.code.code.co_varnames[0])
        owner = None if content is None else state.realize(content)
    if not isinstance(cls, ClassValue) or owner is None:
        raise state.unsupported("super", "super() of something else than a class")
    return SuperValue(cls.real, owner)


@answer_to(callable)
def _callable(state: CaptureState, value: Value) -> Any:
    if isinstance(value, InstanceValue):
        return find_class_entry(state, value.cls, "__call__")[0] is not None
    known = (FunctionValue, BoundMethodValue, PartialValue, ClassValue, CallableReferenceValue)
    if isinstance(value, (*known, ConstantValue, TensorValue, SequenceValue, DictValue, SetValue)):
        return isinstance(value, known)
    raise state.unsupported("call-of-builtin", f"callable() of {value.describe()}")


@call_rule(object.__init__, *(cls.__init__ for cls in KEEP_ARGUMENTS))
def _object_init(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if isinstance(args[0], ExceptionValue):
        if kwargs:
            raise state.raise_exception(TypeError, f"{args[0].cls.__name__}() takes no keyword arguments")
        args[0].args = args[1:]
    elif len(args) != 1 or kwargs:
        raise state.raise_exception(TypeError, "object.__init__() takes exactly one argument")
    return ConstantValue(None)


@call_rule(tuple)
def _tuple(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if args and isinstance(args[0], SequenceValue) and args[0].cls is tuple:
        return args[0]
    return SequenceValue(list(state.items_of(args[0], hinted=True)) if args else [], tuple)


def _truth(state: CaptureState, value: Value | None) -> Any:
    if isinstance(value, TensorValue):
        found = METHOD_RULES["__bool__"](state, value)
        value = value if found is None else found
    return value if isinstance(value, ConditionValue) else value is not None and value.truth(state)


def _new_set(state: CaptureState, cls: type, iterable: Value | None) -> Value:
    return new_set(state, [], cls) if iterable is None else as_set(state, iterable, cls)


answers(
    {
        bool: lambda state, value=None: _truth(state, value),
        list: lambda state, iterable=None: ListValue(
            [] if iterable is None else [*state.items_of(iterable, hinted=True)]
        ),
        set: lambda state, iterable=None: _new_set(state, set, iterable),
        frozenset: lambda state, iterable=None: _new_set(state, frozenset, iterable),
        typing.cast: lambda state, typ, val: val,
    }
)


@rule_of_each(dict, collections.OrderedDict, collections.defaultdict)
def _new_dict(cls: type, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    made = new_dict([], state, cls)
    fill(state, made, *args, **kwargs)
    return made


@answer_to(slice)
def _slice(state: CaptureState, *parts: Value) -> Value:
    none = ConstantValue(None)
    return SliceValue([none, *parts, none] if len(parts) == 1 else [*parts, none][:3])


@answer_to(locals)
def _locals(state: CaptureState) -> Value:
    """A dictionary that nothing fills anew: where a frame asks twice, CPython up to 3.12 would."""
    frame = state.frames[-1]
    assert isinstance(frame, Frame)
    if frame.shows_locals:
        raise state.unsupported("locals", "a second call of locals() in a frame")
    frame.shows_locals = True
    code = frame.code.code
    held: dict[str, Any] = {name: frame.locals.get(name, NULL) for name in code.co_varnames}
    held |= {name: cell.content or NULL for name, cell in frame.cells.items()}
    return state.from_constant(
        {name: state.realize(value) for name, value in held.items() if value is not NULL}
    )
