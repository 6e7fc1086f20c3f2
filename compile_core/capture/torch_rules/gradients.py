"""What autograd keeps on a tensor: ``.grad``, whether it is a leaf, and the function that made it.

A gradient that exists before the call is an input of the graph, found through its tensor. A store to ``.grad``
is a side effect, made when the graph has run, and a later read in the same call finds what was stored.
"""

from __future__ import annotations

import torch

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.tensors import (
    ATTRIBUTE_STORES,
    TensorValue,
    attribute_read,
)
from gradsplit.compile_core.ir.sources import AttributeSource


@attribute_read("grad")
def read_gradient(state: CaptureState, tensor: TensorValue) -> Value:
    stored = tensor.changes.get("grad")
    if stored is not None:
        return stored
    if tensor.real is None or tensor.source is None:
        if tensor.fake.requires_grad:
            raise state.unsupported("gradient", f"the gradient of {tensor.describe()}, a result of the graph")
        return ConstantValue(None)
    _guard_leaf(state, tensor)
    return state.wrap(tensor.real.grad, AttributeSource(tensor.source, "grad"))


def _guard_leaf(state: CaptureState, tensor: TensorValue) -> None:
    """Reading the gradient of anything but a leaf warns; a parameter is one."""
    assert tensor.real is not None and tensor.source is not None
    if not tensor.real.is_leaf:
        raise state.unsupported("gradient", f"the gradient of {tensor.describe()}, which is not a leaf")
    if tensor.cls is not torch.nn.Parameter:
        state.guards.add([tensor.source], "{0}.is_leaf", [], f"{tensor.source} is a leaf")


def store_gradient(state: CaptureState, tensor: TensorValue, value: Value) -> None:
    if tensor.real is None or tensor.source is None:
        raise state.unsupported("gradient-store", f"a store to the gradient of {tensor.describe()}")
    _guard_leaf(state, tensor)
    if isinstance(value, TensorValue):
        own, new = tensor.fake, value.fake
        if (own.shape, own.dtype, own.device) != (new.shape, new.dtype, new.device) or value is tensor:
            raise state.unsupported("gradient-store", f"{value.describe()} as the gradient of another form")
    elif not is_none(value):
        raise state.unsupported("gradient-store", f"{value.describe()} as a gradient")
    tensor.changes["grad"] = value
    state.effects.attribute_changed(tensor, "grad")


ATTRIBUTE_STORES["grad"] = store_gradient


@attribute_read("is_leaf")
def _is_leaf(state: CaptureState, tensor: TensorValue) -> Value:
    if tensor.real is not None and tensor.source is not None and tensor.real.requires_grad:
        negation = "" if tensor.fake.is_leaf else "not "
        state.guards.add(
            [tensor.source], f"{negation}{{0}}.is_leaf", [], f"{tensor.source} is {negation}a leaf"
        )
    return ConstantValue(tensor.fake.is_leaf)


@attribute_read("grad_fn")
def _grad_fn(state: CaptureState, tensor: TensorValue) -> Value:
    if not _is_leaf(state, tensor).truth(state):
        raise state.unsupported("grad-fn", f"the autograd function of {tensor.describe()}")
    return ConstantValue(None)


@attribute_read("data")
def _data(state: CaptureState, tensor: TensorValue) -> Value:
    """The same memory outside of autograd, with a count of changes of its own."""
    made = state.call_tensor_op("call_function", getattr, [tensor, ConstantValue("data")], {})
    if isinstance(made, TensorValue):
        state.graph.alias_made(tensor.node, made.fake)
    return made
