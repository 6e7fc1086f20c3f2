"""Exceptions that the captured program makes."""

from __future__ import annotations

import types

from compile_core.capture.base import CaptureState, Value
from compile_core.capture.constants import ConstantValue
from compile_core.capture.containers import SequenceValue
from compile_core.capture.objects import InstanceValue, bind_class_entry, class_lookup


class ExceptionValue(InstanceValue):
    """An exception that the captured program made."""

    def __init__(self, cls: type[BaseException], args: list[Value]) -> None:
        super().__init__(cls, None, None)
        self.args = args

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "args":
            return SequenceValue(list(self.args), tuple)
        if name in ("__cause__", "__context__", "__traceback__", "__notes__"):
            raise state.unsupported("exception-attribute", f"{name} of an exception")
        if issubclass(self.cls, StopIteration) and name == "value":
            return self.args[0] if self.args else ConstantValue(None)
        return super().get_attribute(state, name)


def make_exception(
    state: CaptureState, cls: type[BaseException], args: list[Value], kwargs: dict[str, Value]
) -> ExceptionValue:
    made = ExceptionValue(cls, args)
    owner, init = class_lookup(cls, "__init__")
    new_owner, _ = class_lookup(cls, "__new__")
    if isinstance(init, types.FunctionType):
        bind_class_entry(state, made, cls, owner or cls, "__init__", init).call(state, args, kwargs)
    elif kwargs:
        raise state.unsupported("exception-call", f"keyword arguments of {cls.__name__}")
    if new_owner is not None and isinstance(new_owner.__dict__["__new__"], staticmethod):
        raise state.unsupported("exception-call", f"{cls.__name__} defines __new__")
    return made
