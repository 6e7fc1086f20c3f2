"""Rules for calls of Python's built-in functions and types."""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import math
import operator
import types
import typing
from typing import Any

import torch

from compile_core.capture import operators
from compile_core.capture.base import CaptureState, NotConstant, Value
from compile_core.capture.classes import ClassValue
from compile_core.capture.constants import ConstantValue, fold
from compile_core.capture.containers import ListValue, SequenceValue, SliceValue, sorted_values
from compile_core.capture.exceptions import ExceptionValue
from compile_core.capture.functions import BoundMethodValue, FunctionValue, PartialValue
from compile_core.capture.mappings import DictValue, SetValue, new_dict
from compile_core.capture.objects import InstanceValue, class_lookup
from compile_core.capture.references import CALL_RULES, CallableReferenceValue, CallRule, call_rule
from compile_core.capture.tensors import TensorValue

_PURE = (
    [abs, ascii, bin, bytes, chr, complex, divmod, format, hex, oct, ord, pow, round, range]
    + [value for name, value in vars(math).items() if callable(value)]
    + [int.from_bytes]
)


def _fold_rule(function: Any) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if function is abs and isinstance(args[0], TensorValue):
            return state.call_tensor_op("call_method", "abs", args, {})
        if function is pow and any(isinstance(argument, TensorValue) for argument in args):
            return operators.binary(state, "**", *args)
        return fold(state, function, args, kwargs)

    return call


for _function in _PURE:
    CALL_RULES[_function] = _fold_rule(_function)


def _binary_rule(symbol: str) -> CallRule:
    return lambda state, args, kwargs: operators.binary(state, symbol, *args, **kwargs)


def _compare_rule(symbol: str) -> CallRule:
    return lambda state, args, kwargs: operators.compare(state, symbol, *args, **kwargs)


for _symbol, (_function, _, _) in operators.BINARY.items():
    CALL_RULES[_function] = _binary_rule(_symbol)
for _symbol, (_function, _, _) in operators.COMPARE.items():
    CALL_RULES[_function] = _compare_rule(_symbol)
for _symbol, _function in operators.IN_PLACE.items():
    CALL_RULES[_function] = _binary_rule(_symbol)
for _symbol, (_function, _) in operators.UNARY.items():
    CALL_RULES[_function] = lambda state, args, kwargs, symbol=_symbol: operators.unary(state, symbol, *args)


@call_rule(operator.index)
def _operator_index(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return fold(state, operator.index, args, kwargs)


@call_rule(operator.getitem)
def _operator_getitem(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    owner, key = args
    return owner.get_item(state, key)


@call_rule(operator.is_, operator.is_not)
def _operator_is(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    raise state.unsupported("call-of-builtin", "operator.is_")


@call_rule(len)
def _len(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    return ConstantValue(value.length(state))


@call_rule(bool)
def _bool(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ConstantValue(args[0].truth(state) if args else False)


def _number_rule(cls: type) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if args and isinstance(args[0], TensorValue):
            raise state.unsupported(
                "data-dependent-value",
                f"{cls.__name__}() of {args[0].describe()} depends on its data",
                "keep the value in a tensor",
            )
        return fold(state, cls, args, kwargs)

    return call


CALL_RULES[int] = _number_rule(int)
CALL_RULES[float] = _number_rule(float)


@call_rule(str)
def _str(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if args and isinstance(args[0], ExceptionValue) and args[0].cls.__str__ is BaseException.__str__:
        inner = args[0].args
        return (
            _str(state, inner, {}) if len(inner) == 1 else fold(state, lambda *reals: str(reals), inner, {})
        )
    return fold(state, str, _printed(args), kwargs)


@call_rule(repr)
def _repr(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return fold(state, repr, _printed(args), kwargs)


def _printed(args: list[Value]) -> list[Value]:
    """Classes print by their names, which stay; other objects with identity print their address."""
    plain = (type.__repr__, type.__str__)
    return [
        ConstantValue(value.real)
        if isinstance(value, ClassValue) and (type(value.real).__repr__, type(value.real).__str__) == plain
        else value
        for value in args
    ]


@call_rule(isinstance)
def _isinstance(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    value, classes = args
    cls = value.python_type()
    for wanted in _classes(state, classes):
        if type(wanted) is types.UnionType:
            raise state.unsupported("isinstance", "isinstance with a union of types")
        if wanted is torch.nn.Parameter or wanted is torch.nn.parameter.Buffer:
            found = issubclass(cls, wanted) and wanted is torch.nn.Parameter
        elif (
            isinstance(value, TensorValue)
            and wanted.__module__ in ("torch", "torch.cuda")
            and not (issubclass(torch.Tensor, wanted) or wanted in (torch.Size, torch.device, torch.dtype))
        ):
            raise state.unsupported("isinstance", f"isinstance of a tensor and {wanted.__qualname__}")
        else:
            found = issubclass(cls, wanted)
        if found:
            return ConstantValue(True)
    return ConstantValue(False)


@call_rule(issubclass)
def _issubclass(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    value, classes = args
    if not isinstance(value, ClassValue):
        raise state.raise_exception(TypeError, "issubclass() arg 1 must be a class")
    return ConstantValue(any(issubclass(value.real, wanted) for wanted in _classes(state, classes)))


def _classes(state: CaptureState, value: Value) -> list[type]:
    if isinstance(value, SequenceValue):
        return [cls for item in value.all(state) for cls in _classes(state, item)]
    if isinstance(value, ClassValue):
        return [value.real]
    raise state.unsupported("isinstance", f"isinstance with {value.describe()}")


@call_rule(type)
def _type(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    return state.wrap(value.python_type(), None)


@call_rule(callable)
def _callable(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    always = (FunctionValue, BoundMethodValue, PartialValue, ClassValue, CallableReferenceValue)
    if isinstance(value, always):
        return ConstantValue(True)
    if isinstance(value, InstanceValue):
        return ConstantValue(class_lookup(value.cls, "__call__")[0] is not None)
    if isinstance(value, (ConstantValue, TensorValue, SequenceValue, DictValue, SetValue)):
        return ConstantValue(False)
    raise state.unsupported("call-of-builtin", f"callable() of {value.describe()}")


@call_rule(object.__init__, BaseException.__init__, Exception.__init__)
def _object_init(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if isinstance(args[0], ExceptionValue):
        args[0].args = args[1:]
    elif len(args) != 1 or kwargs:
        raise state.raise_exception(TypeError, "object.__init__() takes exactly one argument")
    return ConstantValue(None)


@call_rule(tuple)
def _tuple(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return SequenceValue(list(state.items_of(args[0])) if args else [], tuple)


@call_rule(list)
def _list(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ListValue(list(state.items_of(args[0])) if args else [])


def _set_rule(cls: type) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        items = state.items_of(args[0]) if args else []
        return SetValue({item.hash_key(state): item for item in items}, cls)

    return call


CALL_RULES[set] = _set_rule(set)
CALL_RULES[frozenset] = _set_rule(frozenset)


def _dict_rule(cls: type) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        made = new_dict([], state, cls)
        made.update(state, *args, **kwargs)
        return made

    return call


CALL_RULES[dict] = _dict_rule(dict)
CALL_RULES[collections.OrderedDict] = _dict_rule(collections.OrderedDict)


@call_rule(collections.defaultdict)
def _defaultdict(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if len(args) != 1 or kwargs:
        raise TypeError("defaultdict with items")
    made = new_dict([], state, collections.defaultdict)
    made.default_factory = args[0]
    return made


@call_rule(slice)
def _slice(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    none = ConstantValue(None)
    if len(args) == 1:
        return SliceValue([none, args[0], none])
    return SliceValue([*args, none][:3])


@call_rule(sorted)
def _sorted(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (iterable,) = args
    if isinstance(iterable, SetValue):
        items = list(iterable.members.values())
        if "key" in kwargs:
            raise state.unsupported("set-order", "sorted() of a set with a key")
    else:
        items = state.items_of(iterable)
    return ListValue(list(sorted_values(state, items, kwargs.get("key"), kwargs.get("reverse"))))


@call_rule(sum)
def _sum(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def total(iterable: Value, start: Value | None = None) -> Value:
        result = ConstantValue(0) if start is None else start
        for item in state.items_of(iterable):
            result = operators.binary(state, "+", result, item)
        return result

    items = state.items_of(args[0])
    try:
        # Since 3.12 the sum of floats is compensated, which adding one by one would not be.
        constants = [item.as_constant() for item in items]
        if len(args) == 1 and not kwargs:
            return fold(state, lambda: sum(constants), [], {})
    except NotConstant:
        pass
    return total(ListValue(list(items)), *args[1:], **kwargs)


def _extremum_rule(function: Any, symbol: str) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if set(kwargs) - {"key", "default"}:
            raise TypeError("unknown keyword argument")
        items = state.items_of(args[0]) if len(args) == 1 else args
        if not items:
            if "default" in kwargs:
                return kwargs["default"]
            raise state.raise_exception(ValueError, f"{function.__name__}() arg is an empty sequence")
        key = kwargs.get("key")
        keys = items if key is None else [key.call(state, [item], {}) for item in items]
        best = 0
        for index in range(1, len(items)):
            if operators.compare(state, symbol, keys[index], keys[best]).truth(state):
                best = index
        return items[best]

    return call


CALL_RULES[min] = _extremum_rule(min, "<")
CALL_RULES[max] = _extremum_rule(max, ">")


@call_rule(any)
def _any(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (iterable,) = args
    iterator = iterable.iterate(state)
    while (item := iterator.advance(state)) is not None:
        if item.truth(state):
            return ConstantValue(True)
    return ConstantValue(False)


@call_rule(all)
def _all(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (iterable,) = args
    iterator = iterable.iterate(state)
    while (item := iterator.advance(state)) is not None:
        if not item.truth(state):
            return ConstantValue(False)
    return ConstantValue(True)


@call_rule(functools.partial)
def _partial(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, *bound = args
    return PartialValue(function, bound, kwargs)


@call_rule(functools.reduce)
def _reduce(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, iterable, *start = args
    items = [*start, *state.items_of(iterable)]
    if not items:
        raise state.raise_exception(TypeError, "reduce() of empty iterable with no initial value")
    result = items[0]
    for item in items[1:]:
        result = function.call(state, [result, item], {})
    return result


@call_rule(typing.cast)
def _cast(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return args[1]


@call_rule(inspect.isfunction)
def _isfunction(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ConstantValue(args[0].python_type() is types.FunctionType)


BUILTIN_NAMES = vars(builtins)
