"""Existing objects that are known by identity and answer more than that: Python modules, properties, weak references,
callables with a rule."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

from torch._ops import OpOverloadPacket
from torch.backends import ContextProp

from gradsplit.compile_core.capture.object_model.functions import bind_function
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.libraries import is_library_name, is_library_state
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CallRule, answer_to
from gradsplit.compile_core.capture.values.constants import MethodOwner, is_none
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import AttributeSource, CallSource, ItemSource, Source
from gradsplit.compile_core.torch_facts.bindings import VARIABLE_FUNCTIONS


class PythonModuleValue(ReferenceValue):
    """A module in the sense of ``import``."""

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        scope = self.real.__dict__
        stored = state.effects.stored_global(scope, name)
        if stored is not None and stored is not MISSING:
            return stored
        found = scope.get(name, MISSING) if stored is None else MISSING
        owner = self.source or state.reference_source(self.real.__name__, self.real)
        place = AttributeSource(owner, "__dict__")
        if found is MISSING:
            setting = inspect.getattr_static(type(self.real), name, None)
            if isinstance(setting, ContextProp):
                return state.wrap(setting.getter, None).call(state, [], {})
            try:
                found = getattr(self.real, name)
                if stored is MISSING:
                    raise AttributeError(f"module {self.real.__name__!r} has no attribute {name!r}")
            except AttributeError as error:
                if stored is None and not is_library_name(self.real.__name__):
                    state.guards.absent(place, name)
                raise state.raise_exception(AttributeError, str(error)) from None
            if not is_library_name(self.real.__name__):
                raise state.unsupported(
                    "module-getattr", f"{self.real.__name__} computes its attribute {name!r}"
                )
            return state.wrap(found, None)
        if is_library_name(self.real.__name__) and not is_library_state(self.real.__name__, name, found):
            return state.wrap(found, None)
        return state.wrap(found, ItemSource(place, name))

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        self._check_store(state, name)
        state.effects.global_changed(self.real.__dict__, name, value)

    def delete_attribute(self, state: CaptureState, name: str) -> None:
        self._check_store(state, name)
        self.get_attribute(state, name)  # raises where there is none
        state.effects.global_changed(self.real.__dict__, name, MISSING)

    def _check_store(self, state: CaptureState, name: str) -> None:
        if type(self.real) is not types.ModuleType or is_library_name(self.real.__name__):
            raise state.unsupported("module-attribute", f"a store to {self.real.__name__}.{name}")


class PropertyValue(ReferenceValue):
    """What has parts that stay: a property or an attribute of a class in C as an object, as its class gives it, and the
    object that has torch's functions in C."""

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        known = name in ("fget", "fset", "fdel", "__doc__", "__get__", "__set__")
        if (known or self.real is VARIABLE_FUNCTIONS) and hasattr(self.real, name):
            return state.wrap(getattr(self.real, name), None)
        return super().get_attribute(state, name)


def is_weak_reference(real: object) -> bool:
    """Of the classes whose call does nothing but give the object."""
    return type(real) in (weakref.ReferenceType, weakref.KeyedRef)


class WeakReferenceValue(ReferenceValue):
    """A weak reference, of weak containers or of its own; its call gives the object."""

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if args or kwargs:
            raise state.raise_exception(TypeError, "a weak reference takes no arguments")
        found = state.wrap(self.real(), None if self.source is None else CallSource(self.source))
        refuse_unless_held(state, found)
        return found


class MadeWeakReference(Value):
    """A weak reference to what the frame made."""

    cls = weakref.ReferenceType

    def __init__(self, target: Value) -> None:
        self.target = target

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        refuse_unless_held(state, self.target)
        return self.target


def refuse_unless_held(state: CaptureState, target: Value) -> None:
    """Nobody counts references here. What a variable holds is alive, and what was there before the call as long as the
    call has let go of nothing."""
    held = any(target is value for frame in state.frames for value in frame.held_values())
    let_go = state.effects.may_have_let_go() or state.frames[0].dropped_arguments()
    existed = target.source is not None and not let_go
    if not held and not existed and not is_none(target):
        raise state.unsupported("weak-reference", f"whether {target.describe()} is still alive")


@answer_to(weakref.ref)
def _make_reference(state: CaptureState, target: Value) -> Any:
    cls, real = target.python_type(), getattr(target, "real", None)
    if not cls.__weakrefoffset__:
        raise state.raise_exception(TypeError, f"cannot create weak reference to {cls.__name__!r} object")
    if real is None or target.source is None:
        return MadeWeakReference(target)
    # The one reference without a callback, as long as somebody holds it; a guard that held the object would keep it.
    found = weakref.ref(real)
    text = f"{target.source} is the same object"
    state.guards.add([target.source], "{c0}() is {0}", [found], text)
    return state.wrap(found, state.reference_source("weak_reference", found))


class CallableReferenceValue(MethodOwner, ReferenceValue):
    """A callable with a rule of its own: built-in functions, tensor functions, special functions of
    libraries."""

    def __init__(self, real: Any, rule: CallRule | None, source: Source | None = None) -> None:
        super().__init__(real, source)
        self.rule = rule

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if state.overriding and state.is_overridable(self.real):
            return state.through_overrides(self.real, args, kwargs, functools.partial(self._call, state))
        return self._call(state, args, kwargs)

    def _call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.rule is None:
            raise state.unsupported(
                "call-without-rule",
                f"no rule for a call of {self.describe()}",
                "move the call out of the compiled function",
            )
        try:
            return self.rule(state, args, kwargs)
        except TypeError as error:
            # A rule that was called with arguments that it does not take.
            raise state.unsupported("call-form", f"{self.describe()}: {error}") from error

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return state.from_constant(getattr(self.real, name))
        if isinstance(self.real, OpOverloadPacket) and name in self.real.overloads():
            return state.wrap(getattr(self.real, name), None)
        if isinstance(self.real, types.BuiltinFunctionType) and not hasattr(self.real, name):
            raise state.no_attribute(type(self.real), name)
        return super().get_attribute(state, name)

    do___get__ = bind_function
