"""Tensors that wrap others, as DTensor does: one value of the graph each, which the class's code computes with.

Their inner tensors, and what functions of their classes give, are nodes; everything else about them the fake tells,
whose context the guards compare with that of the tensor that comes with a call.
"""

from __future__ import annotations

import types
from typing import Any

from torch import fx

from gradsplit.compile_core.capture.object_model.class_entries import class_lookup
from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.values.base import CaptureState, Value, stored_attribute
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, own_names
from gradsplit.compile_core.ir.sources import Source
from gradsplit.compile_core.torch_facts.wrapper_tensors import Flattened, is_wrapper


class WrapperValue(TensorValue):
    """A tensor that wraps others."""

    fake: Any

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in Flattened.of(self.fake).names and name not in self.changes:
            inner: Any = state.call_tensor_op("call_function", getattr, [self, ConstantValue(name)], {})
            if self.source is not None:
                state.graph.alias_made(self.node, inner.fake)
            return inner
        if name in own_names(self.cls):
            return self._of_class(state, name)
        if name in vars(self.fake) and self.real is None and name not in self.changes:
            return state.from_constant(getattr(self.fake, name))
        if self.real is not None and name in self.real.__dict__:
            return stored_attribute(state, self, self.real, name)
        return super().get_attribute(state, name)

    def _of_class(self, state: CaptureState, name: str) -> Value:
        """What its class says of it: its code is followed, but for a library's, which is asked about the fake."""
        owner, entry = class_lookup(self.cls, name)
        if isinstance(entry, types.MemberDescriptorType):
            return state.from_constant(getattr(self.fake, name))
        if not is_library_object(owner):
            return state.class_attribute(self, name)
        if isinstance(entry, (types.FunctionType, types.BuiltinFunctionType)):
            return BuiltinMethod(self, name)
        return state.from_constant(getattr(self.fake, name))

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if name in own_names(self.cls) and is_library_object(class_lookup(self.cls, name)[0]):
            return state.call_tensor_op("call_method", name, [self, *args], kwargs)
        return super().call_method(state, name, args, kwargs)


def tensor_value(
    node: fx.Node, fake: Any, cls: type, source: Source | None = None, real: Any = None
) -> TensorValue:
    """The value of a tensor of the graph, which may wrap others."""
    return (WrapperValue if is_wrapper(fake) else TensorValue)(node, fake, cls, source, real)
