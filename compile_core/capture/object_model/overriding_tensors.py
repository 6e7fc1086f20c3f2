"""Tensors of a class with a ``__torch_function__`` of its own, which is asked in the place of torch's functions.

The graph computes with a plain tensor of the same memory; the object made of its result where it leaves the call is a
view of it of the class, as torch itself makes one. What is asked, and when, is in ``torch_rules/function_overrides``.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir.sources import ConvertedSource, Reference, Source
from gradsplit.compile_core.torch_facts.function_overrides import is_function_enabled, plain_tensor

_OF_TORCH = torch.Tensor.__mro__[:-1]
# What the plain tensor, of which it is a view or which is a view of it, would answer otherwise.
_OF_THE_OBJECT = frozenset(
    [
        *("grad", "is_leaf", "grad_fn", "_base", "_grad", "_version", "retains_grad", "output_nr", "data"),
        *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "detach_"),
        *("_is_view", "_backward_hooks", "backward", "set_", "resize_"),
    ]
)


_PLAIN = Reference("plain_tensor", plain_tensor)


class OverridingTensor(InstanceValue):
    """``tensor`` is what the graph computes with."""

    def __init__(
        self, cls: type, tensor: TensorValue, real: Any = None, source: Source | None = None
    ) -> None:
        super().__init__(cls, real, source)
        self.tensor = tensor
        tensor.is_shared = True

    def hash_key(self, state: CaptureState) -> Any:
        return self if self.real is None else self.real

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(torch.Tensor.as_subclass, self.tensor, self.cls)

    def truth(self, state: CaptureState) -> bool:
        return self.call_method(state, "__bool__", [], {}).truth(state)

    def plain_attribute(self, state: CaptureState, name: str) -> Value | None:
        owner, entry = find_class_entry(state, self.cls, name)
        is_method = owner in _OF_TORCH and callable(entry) and not isinstance(entry, type)
        if is_method and self.own_attribute(state, name) is None:
            return BuiltinMethod(self, name)
        return super().plain_attribute(state, name)

    def read_in_c(self, state: CaptureState, name: str) -> Value:
        def read(args: list[Value], kwargs: dict[str, Value]) -> Value:
            return self.plain(state, name).get_attribute(state, name)

        return state.through_overrides(getattr, [self, ConstantValue(name)], {}, read)

    def plain(self, state: CaptureState, name: str) -> TensorValue:
        """The tensor of the graph, to be asked for what lies in it."""
        other = self.tensor.source is not None or self.tensor.fake.requires_grad
        if other and name in _OF_THE_OBJECT:
            raise state.unsupported("tensor-subclass", f"{name!r} of {self.describe()}")
        return self.tensor

    def store(self, state: CaptureState, name: str, value: Value) -> None:
        if find_class_entry(state, self.cls, name)[0] in _OF_TORCH:
            raise state.unsupported("attribute-store", f"a store to {name!r} of {self.describe()}")
        super().store(state, name, value)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        owner, _ = find_class_entry(state, self.cls, name)
        if owner not in _OF_TORCH:
            return self.get_attribute(state, name).call(state, args, kwargs)

        def call(args: list[Value], kwargs: dict[str, Value]) -> Value:
            return self.plain(state, name).call_method(state, name, args[1:], kwargs)

        return state.through_overrides(getattr(torch.Tensor, name), [self, *args], kwargs, call)


def wrap_overriding(state: CaptureState, real: torch.Tensor, source: Source | None) -> OverridingTensor:
    """The value of an existing tensor of such a class."""
    if source is None or not is_function_enabled():
        raise state.unsupported("tensor-subclass", f"a tensor of the subclass {type(real).__qualname__} here")
    state.guards.add([], "{c0}()", [is_function_enabled], "__torch_function__ of classes is asked")
    state.guards.type_is(source, type(real))
    tensor = state.wrap(plain_tensor(real), ConvertedSource(source, _PLAIN))
    if not isinstance(tensor, TensorValue):
        raise state.unsupported("tensor-subclass", f"what lies in {tensor.describe()}")
    state.overriding = True
    return OverridingTensor(type(real), tensor, real, source)
