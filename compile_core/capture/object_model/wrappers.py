"""Tensors that wrap others, as DTensor does: one value of the graph each, which the class's code computes with.

Their inner tensors, and what functions of their classes give, are nodes; everything else about them the fake tells,
whose context the guards compare with that of the tensor that comes with a call.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.libraries import is_library_object
from gradsplit.compile_core.capture.open_numbers.size_marks import SizeMarks
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import TensorSizes
from gradsplit.compile_core.capture.values.base import CaptureState, Value, stored_attribute
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, own_names
from gradsplit.compile_core.ir.sources import AttributeSource, Source
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
        owner = next(cls for cls in self.cls.__mro__ if name in vars(cls))
        entry = vars(owner)[name]
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
        owner = next((cls for cls in self.cls.__mro__ if name in vars(cls)), torch.Tensor)
        if name in own_names(self.cls) and is_library_object(owner):
            return state.call_tensor_op("call_method", name, [self, *args], kwargs)
        return super().call_method(state, name, args, kwargs)


def guard_wrapper(state: CaptureState, real: Any, source: Source) -> dict[int, TensorSizes]:
    """What a graph takes for granted about a wrapper beside what it does of any tensor.

    Returns:
        The sizes of inner tensors that are open, by their ``id``: of nested tensors, whose own sizes follow from them.
    """
    parts = Flattened.of(real)
    text = f"{source} is the same beside its inner tensors"
    state.guards.add([source], "{c0}.is_of({0})", [parts], text)
    places = [(getattr(real, name), AttributeSource(source, name)) for name in parts.names]
    open_sizes = _sizes_of_rows(state, places) if real._has_symbolic_sizes_strides else {}
    for inner, place in places:
        sizes = open_sizes.get(id(inner))
        state.guards.tensor(place, inner, None if sizes is None else sizes.static_shape)
        if is_wrapper(inner):
            open_sizes |= guard_wrapper(state, inner, place)
    return open_sizes


def _sizes_of_rows(
    state: CaptureState, places: Sequence[tuple[torch.Tensor, Source]]
) -> dict[int, TensorSizes]:
    """The sizes of what a nested tensor holds: other rows change them all. Two such tensors have one size if they hold
    one tensor of where their rows end."""
    for inner, place in places:
        for other, where in state.inner_places:
            (state.guards.same if inner is other else state.guards.distinct)(where, place)
    state.inner_places += places
    differs = [state.sizes.history.open_sizes(place, tuple(inner.shape)) for inner, place in places]
    # Not those that torch has marked on them, where a size of 1 would be an error.
    marks = SizeMarks(maybe_dynamic={0} if any(differs) else set())
    sizes = {id(inner): state.sizes.of_tensor(inner, place, marks) for inner, place in places}
    return {inner: found for inner, found in sizes.items() if found is not None}
