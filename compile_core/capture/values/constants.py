"""Values that are known in full: literals, and what pure functions of literals return."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import re
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.attention

from gradsplit.compile_core.capture.values.base import (
    CaptureState,
    NotConstant,
    PlainCall,
    SymbolicRaise,
    Value,
    constants_of,
)
from gradsplit.compile_core.errors import CompileError

LITERAL_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    torch.nn.attention.SDPBackend,
    # The default of counts and flags in the functions of ``re``, from 3.13 on.
    type(getattr(re, "_zero_sentinel", 0)),
)


# Objects of C types that are immutable and compare by value: their methods are pure functions.
FOLDED_TYPES = (
    *(re.Pattern, re.Match, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)

# Where the classes of such objects are that torch does not import by itself.
_FOLDED_MODULES = frozenset(
    f"torch.distributed.{name}" for name in ("device_mesh", "tensor.placement_types", "tensor._dtensor_spec")
)


def is_folded(cls: type) -> bool:
    """Whether objects of a class are immutable and compare by value, and their methods are pure functions."""
    return cls in FOLDED_TYPES or cls.__module__ in _FOLDED_MODULES


# What a device does as a context manager, filled in by the rules for modes.
DEVICE_CONTEXT: dict[str, Callable[[CaptureState, torch.device], Value]] = {}


def is_literal(real: object) -> bool:
    """Whether an object is immutable, compares by value, and prints as itself."""
    return type(real) in LITERAL_TYPES or isinstance(real, (enum.Enum, np.dtype))


class ConstantValue(Value):
    """A literal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def python_type(self) -> type:
        return type(self.value)

    def describe(self) -> str:
        return f"the constant {self.value!r}"

    def as_constant(self) -> Any:
        return self.value

    def hash_key(self, state: CaptureState) -> Any:
        return self.value

    def truth(self, state: CaptureState) -> bool:
        return bool(self.value)

    def graph_argument(self, state: CaptureState) -> Any:
        if isinstance(self.value, range):
            return list(self.value)
        if isinstance(self.value, enum.Enum):
            kinds: tuple[Any, ...] = (int, float, str)
            plain: Any = next((cls for cls in kinds if isinstance(self.value, cls)), None)
            if plain is None:
                raise state.unsupported(
                    "graph-argument", f"{self.value!r} as an argument of a tensor operation"
                )
            return plain(self.value)
        return state.graph.hold("object", self.value) if is_folded(type(self.value)) else self.value

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if isinstance(self.value, enum.Enum):
            return state.enum_attribute(self, name)
        found = ask_python(state, getattr, self.value, name)
        if callable(found) and not isinstance(found, type):
            return BuiltinMethod(self, name)
        return state.from_constant(found)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if isinstance(self.value, enum.Enum) and name in ("__copy__", "__deepcopy__"):
            return self
        method = ask_python(state, getattr, self.value, name)
        if isinstance(self.value, torch.device) and name in DEVICE_CONTEXT:
            return DEVICE_CONTEXT[name](state, self.value)
        if name == "join" and len(args) == 1:
            return fold(state, lambda *items: method(items), state.items_of(args[0]), kwargs)
        if name == "format" and isinstance(self.value, str):
            return state.filled_format(self.value, args, kwargs)
        return fold(state, method, args, kwargs)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if callable(self.value):
            return self.get_attribute(state, "__call__").call(state, args, kwargs)
        raise state.raise_exception(TypeError, f"{type(self.value).__name__!r} object is not callable")

    def iterate(self, state: CaptureState) -> Value:
        return fold(state, tuple, [self], {}).iterate(state)

    def length(self, state: CaptureState) -> int:
        return int(fold(state, len, [self], {}).as_constant())

    def get_item(self, state: CaptureState, key: Value) -> Value:
        return fold(state, lambda index: self.value[index], [key], {})

    def contains(self, state: CaptureState, item: Value) -> bool:
        return bool(fold(state, lambda wanted: wanted in self.value, [item], {}).as_constant())


def as_value(given: Any) -> Value:
    return given if isinstance(given, Value) else ConstantValue(given)


def is_none(value: Value | None) -> bool:
    """Whether a value is the constant None."""
    return isinstance(value, ConstantValue) and value.python_type() is type(None)


def fold(state: CaptureState, function: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Call a pure function on known arguments. What it raises, the captured program raises."""
    try:
        real_args = constants_of(args)
        real_kwargs = {key: value.as_constant() for key, value in kwargs.items()}
    except NotConstant as error:
        name = getattr(function, "__name__", str(function))
        raise error.args[0].refuse_argument(state, name) from None
    return state.from_constant(ask_python(state, function, *real_args, **real_kwargs))


def ask_python(state: CaptureState, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function of Python itself gives. What it raises, the captured program raises."""
    try:
        return function(*args, **kwargs)
    except (SymbolicRaise, CompileError, PlainCall, NotConstant):
        raise  # of the capture, which a stand-in was asked for
    except Exception as error:
        raise state.raise_exception(type(error), *error.args) from None


class BuiltinMethod(Value):
    """A method of a built-in type, bound to its object."""

    cls = types.BuiltinMethodType

    def __init__(self, owner: Value, name: str) -> None:
        self.owner = owner
        self.name = name

    def describe(self) -> str:
        return f"the method {self.name!r} of {self.owner.describe()}"

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self.owner.call_method(state, self.name, args, kwargs)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "__name__":
            return ConstantValue(self.name)
        return self.owner if name == "__self__" else super().get_attribute(state, name)

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(getattr, self.owner, self.name)


class MethodOwner(Value):
    """A value with methods of the program: its functions whose names begin with ``do_``, of the value, the state and
    the arguments. What one gives is a constant if it is no value."""

    methods: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init_subclass__(cls) -> None:
        own = {name[3:]: function for name, function in vars(cls).items() if name.startswith("do_")}
        cls.methods = {**cls.methods, **own}

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        cls = self.python_type()
        if name not in self.methods and not hasattr(cls, name) and not cls.__dictoffset__:
            raise state.no_attribute(cls, name)
        return BuiltinMethod(self, name) if name in self.methods else super().get_attribute(state, name)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        method = self.methods.get(name)
        if method is None:
            return super().call_method(state, name, args, kwargs)
        try:
            return as_value(method(self, state, *args, **kwargs))
        except TypeError as error:
            shown = f"{self.python_type().__name__}.{name}: {error}"
            raise state.unsupported("method-form", shown) from error


LIST_ITERATOR, TUPLE_ITERATOR = type(iter([])), type(iter(()))


class IteratorValue(Value):
    """The base of the iterators."""

    cls: type = object

    def iterate(self, state: CaptureState) -> Value:
        return self


class SequenceIterator(IteratorValue):
    """An iterator over items that are all there; also the iterator of a list that may grow meanwhile."""

    def __init__(self, items: list[Any], cls: type = TUPLE_ITERATOR, live_list: Value | None = None) -> None:
        self.items = items
        self.index = 0
        self.cls = cls
        # The list that the iterator runs over, while it does; None where nothing can change the items.
        self.live_list = live_list

    def advance(self, state: CaptureState) -> Value | None:
        if self.index >= len(self.items):
            self.items = []  # an iterator that has ended stays so, even if its list grows
            self.live_list = None
            self.index = 0
            return None
        item = state.realize(self.items[self.index])
        self.items[self.index] = item
        self.index += 1
        return item

    def rebuild(self, writer: Any) -> str | None:
        if self.live_list is None:
            is_of_list = self.cls is LIST_ITERATOR  # which has ended
            return (
                writer.bind("iter([])") if is_of_list else writer.made(iter, tuple(self.items[self.index :]))
            )
        name = writer.bind(f"iter({writer.emit(self.live_list)})")
        # The list may be longer once the effects are stored, and the position is cut off at its end.
        writer.late.append(f"{name}.__setstate__({self.index})")
        return name
