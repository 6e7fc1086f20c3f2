"""What the ``typing`` module makes at run time: ``list[int]``, ``int | None``, ``Foo[T]``, type variables."""

from __future__ import annotations

import operator
import types
import typing
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ask_python
from gradsplit.compile_core.capture.values.references import ReferenceValue

TYPE_FORMS: tuple[Any, ...] = (
    types.GenericAlias,
    types.UnionType,
    typing._BaseGenericAlias,  # type: ignore[attr-defined]
    typing._SpecialForm,
    typing.TypeVar,
    typing.ForwardRef,
)


class TypeFormValue(ReferenceValue):
    """A type form: immutable, and compared by value."""

    def as_constant(self) -> Any:
        return self.real

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        found = ask_python(state, getattr, self.real, name)
        if isinstance(found, (types.FunctionType, types.MethodType)):
            raise state.unsupported("type-form", f"the method {name!r} of {self.real!r}")
        return state.from_constant(found)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        return subscript(state, self.real, key)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        origin = getattr(self.real, "__origin__", None)
        if not isinstance(origin, type) or not getattr(self.real, "_inst", True):
            raise state.unsupported("type-form", f"a call of {self.real!r}")
        made = state.wrap(origin, None).call(state, args, kwargs)
        if not origin.__dictoffset__:
            return made
        try:
            made.set_attribute(state, "__orig_class__", self)
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), (AttributeError, TypeError)):
                raise
        return made


def subscript(state: CaptureState, real: Any, key: Value) -> Value:
    """``real[key]`` of a class or a type form."""
    try:
        parameter = key.as_constant()
    except NotConstant:
        raise state.unsupported("type-form", f"{real!r} with {key.describe()} as a parameter") from None
    return state.from_constant(ask_python(state, operator.getitem, real, parameter))
