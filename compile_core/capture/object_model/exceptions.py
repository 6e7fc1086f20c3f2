"""Exceptions that the captured program makes, raises and catches, with their causes and contexts.

The traceback of a symbolic exception is not known. A program that looks into one, or hands out an exception after it
was raised, is not captured.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.objects import InstanceValue, bind_class_entry
from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue
from gradsplit.compile_core.capture.values.references import ReferenceValue


class TracebackValue(Value):
    """The traceback of a raised exception: it may be passed on, but not looked into."""

    cls = types.TracebackType


class ExceptionValue(InstanceValue):
    """An exception. ``links`` are what it was raised from and during, and whether to show that."""

    def __init__(self, cls: type[BaseException], args: list[Value]) -> None:
        super().__init__(cls, None, None)
        self.args = args
        none, shown = ConstantValue(None), ConstantValue(False)
        self.links: dict[str, Value] = {"__cause__": none, "__context__": none, "__suppress_context__": shown}
        self.was_raised = False

    @property
    def builtin_class(self) -> type[BaseException]:
        """The class of Python that the exception's class is built on."""
        return next(entry for entry in self.cls.__mro__ if not entry.__flags__ & _HEAP_TYPE)

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "args":
            return SequenceValue(list(self.args), tuple)
        if name in self.links:
            return self.links[name]
        if name == "__traceback__":
            return TracebackValue() if self.was_raised else ConstantValue(None)
        owner, entry = find_class_entry(state, self.cls, name)
        if name in self.methods and owner is BaseException:
            return BuiltinMethod(self, name)
        if isinstance(entry, (types.GetSetDescriptorType, types.MemberDescriptorType)) and owner is not None:
            return self._field_of_builtin(state, owner, name)
        return super().get_attribute(state, name)

    def _field_of_builtin(self, state: CaptureState, owner: type, name: str) -> Value:
        """``StopIteration.value``, ``OSError.errno`` and so on: what Python's own class keeps of the arguments."""
        if name in self.changes:
            return self.changes[name]
        if issubclass(self.cls, BaseExceptionGroup):
            return (
                self.args[0]
                if name == "message"
                else SequenceValue(list(state.items_of(self.args[1])), tuple)
            )
        if name in ("value", "code") and issubclass(owner, (StopIteration, SystemExit)):
            return self.args[0] if self.args else ConstantValue(None)
        if issubclass(self.cls, _TAKE_NAMES):
            raise state.unsupported("exception-attribute", f"{name} of {self.describe()}")
        return self._fold(state, lambda made: getattr(made, name))

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        if name == "args":
            self.args = state.items_of(value)
        elif name in self.links:
            self.links[name] = value
            if name == "__cause__":
                self.links["__suppress_context__"] = ConstantValue(True)
        elif name == "__traceback__":
            if not isinstance(value, TracebackValue) and self.was_raised:
                raise state.unsupported("exception-traceback", "a store to __traceback__")
        elif isinstance(find_class_entry(state, self.cls, "__setattr__")[1], types.WrapperDescriptorType):
            self.store(state, name, value)
        else:
            super().set_attribute(state, name, value)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        method = self.methods.get(name)
        if method is None or find_class_entry(state, self.cls, name)[0] is not BaseException:
            return super().call_method(state, name, args, kwargs)
        return method(self, state, *args, **kwargs)

    def add_note(self, state: CaptureState, note: Value) -> Value:
        if "__notes__" not in self.changes:
            self.change(state, "__notes__", ListValue([]))
        notes = self.changes["__notes__"]
        notes.call_method(state, "append", [note], {})
        return ConstantValue(None)

    def with_traceback(self, state: CaptureState, traceback: Value) -> Value:
        self.set_attribute(state, "__traceback__", traceback)
        return self

    def initialize(self, state: CaptureState, *args: Value) -> Value:
        self.args = list(args)
        return ConstantValue(None)

    def text(self, state: CaptureState) -> Value:
        """What ``BaseException.__str__`` and its kin give."""
        if self.builtin_class.__str__ is BaseException.__str__:
            if len(self.args) == 1:
                return state.text_of(self.args[0])
            return (
                ConstantValue("") if not self.args else state.text_of(SequenceValue(list(self.args), tuple))
            )
        return self._fold(state, str)

    def representation(self, state: CaptureState) -> Value:
        parts = [state.representation_of(argument).as_constant() for argument in self.args]
        return ConstantValue(f"{self.cls.__name__}({', '.join(parts)})")

    def _fold(self, state: CaptureState, function: Callable[[Any], Any]) -> Value:
        """What is asked of a real exception of Python's own class with the same arguments."""
        return fold(state, lambda *reals: function(self.builtin_class(*reals)), self.args, {})

    methods: ClassVar = {
        "add_note": add_note,
        "with_traceback": with_traceback,
        "__init__": initialize,
        "__str__": text,
        "__repr__": representation,
    }


_HEAP_TYPE = 1 << 9


def make_exception(
    state: CaptureState, cls: type[BaseException], args: list[Value], kwargs: dict[str, Value]
) -> ExceptionValue:
    made = ExceptionValue(cls, args)
    owner, init = find_class_entry(state, cls, "__init__")
    builtin = made.builtin_class
    if isinstance(find_class_entry(state, cls, "__new__")[1], staticmethod):
        raise state.unsupported("exception-call", f"{cls.__name__} defines __new__")
    if owner is not None and isinstance(init, types.FunctionType):
        if issubclass(builtin, _KEEP_MORE):
            raise state.unsupported("exception-call", f"{cls.__name__} extends {builtin.__name__}")
        bind_class_entry(state, made, cls, owner, "__init__", init).call(state, args, kwargs)
    elif kwargs:
        if issubclass(builtin, _TAKE_NAMES):
            raise state.unsupported("exception-call", f"keyword arguments of {cls.__name__}")
        raise state.raise_exception(TypeError, f"{cls.__name__}() takes no keyword arguments")
    if issubclass(cls, BaseExceptionGroup):
        _check_group(state, made)
    if cls is OSError and len(args) > 1:  # which chooses a class by the number
        made.cls = fold(state, lambda *reals: type(OSError(*reals)), args, {}).as_constant()
    return made


# Classes of Python whose initializers keep more than the arguments, ...
_KEEP_MORE = (OSError, ImportError, UnicodeError, SyntaxError, BaseExceptionGroup)
# ... those that the interpreter fills with names that a symbolic exception does not know, ...
_TAKE_NAMES = (ImportError, AttributeError, NameError)
# ... and all others.
KEEP_ARGUMENTS = [
    cls
    for cls in vars(builtins).values()
    if isinstance(cls, type)
    and issubclass(cls, BaseException)
    and not issubclass(cls, (*_KEEP_MORE, *_TAKE_NAMES))
]


def raised_during(state: CaptureState, value: Value, handled: Value | None) -> None:
    """Note that an exception is raised while another is handled: the other becomes its context."""
    if not isinstance(value, ExceptionValue):
        return
    value.was_raised = True
    if not isinstance(handled, ExceptionValue) or handled is value:
        return
    # As CPython does, a chain that would lead back to the exception is cut.
    link = handled
    while isinstance(before := link.links["__context__"], ExceptionValue):
        if before is value:
            link.links["__context__"] = ConstantValue(None)
            break
        link = before
    value.links["__context__"] = handled


answer_to(sys.exception)(lambda state: state.handled_exception())


@answer_to(sys.exc_info)
def _exc_info(state: CaptureState) -> Value:
    handled = state.handled_exception()
    if handled is None:
        return SequenceValue([ConstantValue(None)] * 3, tuple)
    return SequenceValue([state.wrap(handled.python_type(), None), handled, TracebackValue()], tuple)


def exception_to_raise(state: CaptureState, value: Value) -> SymbolicRaise:
    """What ``raise value`` raises."""
    if isinstance(value, ReferenceValue) and isinstance(value.real, type):
        if not issubclass(value.real, BaseException):
            return state.raise_exception(TypeError, "exceptions must derive from BaseException")
        value = value.call(state, [], {})
    if not isinstance(value, ExceptionValue):
        if issubclass(value.python_type(), BaseException):
            raise state.unsupported("raise", f"raising {value.describe()}, which existed before")
        return state.raise_exception(TypeError, "exceptions must derive from BaseException")
    raised_during(state, value, state.handled_exception())
    return SymbolicRaise(value)


# Exception groups


def _check_group(state: CaptureState, made: ExceptionValue) -> None:
    if len(made.args) != 2:
        raise state.unsupported("exception-call", "an exception group without message and exceptions")
    members = state.items_of(made.args[1])
    if not members or not all(isinstance(member, ExceptionValue) for member in members):
        raise state.unsupported("exception-call", "an exception group of something else than exceptions")
    if made.cls is BaseExceptionGroup and all(
        issubclass(member.python_type(), Exception) for member in members
    ):
        made.cls = ExceptionGroup


def split_group(
    state: CaptureState, value: Value, matches: Callable[[ExceptionValue], bool]
) -> tuple[ExceptionValue | None, ExceptionValue | None]:
    """An exception or group in two: what matches, and the rest; None for a side without exceptions."""
    if not isinstance(value, ExceptionValue):
        raise state.unsupported("except", f"an except* clause for {value.describe()}")
    if matches(value):
        return value, None
    if not issubclass(value.cls, BaseExceptionGroup):
        return None, value
    if value.cls not in (BaseExceptionGroup, ExceptionGroup):
        raise state.unsupported("except", f"a split of {value.describe()}")
    sides: tuple[list[Value], list[Value]] = ([], [])
    for member in state.items_of(value.args[1]):
        for side, part in zip(sides, split_group(state, member, matches), strict=True):
            if part is not None:
                side.append(part)
    matched, rest = (derive_group(value, side) if side else None for side in sides)
    return matched, rest


def derive_group(group: ExceptionValue, members: list[Value]) -> ExceptionValue:
    """A group with other members that keeps what is known of the first."""
    made = ExceptionValue(group.cls, [group.args[0], ListValue(list(members))])
    made.links = dict(group.links)
    made.was_raised = group.was_raised
    if MISSING is not group.changes.get("__notes__", MISSING):
        made.changes["__notes__"] = group.changes["__notes__"]
    return made


def reraise_rest(state: CaptureState, original: Value, parts: list[Value]) -> Value:
    """What is left to raise after the except* clauses of one try block; None where nothing is."""
    left = [part for part in parts if isinstance(part, ExceptionValue)]
    if not left:
        return ConstantValue(None)
    if not isinstance(original, ExceptionValue) or not issubclass(original.cls, BaseExceptionGroup):
        return left[0]
    leaves = {id(leaf) for leaf in _leaves(state, original)}
    again = [part for part in left if all(id(leaf) in leaves for leaf in _leaves(state, part))]
    raised = [part for part in left if part not in again]
    kept = {id(leaf) for part in again for leaf in _leaves(state, part)}
    rest = split_group(state, original, lambda part: id(part) in kept)[0] if kept else None
    if not raised:
        return rest or ConstantValue(None)
    members: list[Value] = [*raised, *([rest] if rest is not None else [])]
    return make_exception(state, BaseExceptionGroup, [ConstantValue(""), ListValue(list(members))], {})


def _leaves(state: CaptureState, value: Value) -> list[Value]:
    if isinstance(value, ExceptionValue) and issubclass(value.cls, BaseExceptionGroup):
        return [leaf for member in state.items_of(value.args[1]) for leaf in _leaves(state, member)]
    return [value]
