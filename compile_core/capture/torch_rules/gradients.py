"""What autograd keeps on a tensor: ``.grad``, whether it is a leaf, and the function that made it.

A gradient that exists before the call is an input of the graph, found through its tensor. A store to ``.grad``
is a side effect, made when the graph has run, and a later read in the same call finds what was stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.capture.torch_rules.modes import grad_mode
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.tensors import (
    TensorValue,
    attribute_read,
    attribute_store,
)
from gradsplit.compile_core.capture.values.view_copies import note_view_copy
from gradsplit.compile_core.ir.sources import AttributeSource, Source


@attribute_read("grad")
def read_gradient(state: CaptureState, tensor: TensorValue) -> Value:
    stored = tensor.changes.get("grad")
    if stored is not None:
        return stored
    if tensor.real is None or tensor.source is None:
        if tensor.fake.requires_grad and not tensor.fake.is_leaf:
            raise state.unsupported("gradient", f"the gradient of {tensor.describe()}, a result of the graph")
        return ConstantValue(None)
    guard_leaf(state, tensor)
    return state.wrap(tensor.real.grad, AttributeSource(tensor.source, "grad"))


def guard_leaf(state: CaptureState, tensor: TensorValue) -> Source:
    """Reading the gradient of anything but a leaf warns; a parameter is one."""
    assert tensor.real is not None and tensor.source is not None
    if not tensor.real.is_leaf:
        raise state.unsupported("gradient", f"the gradient of {tensor.describe()}, which is not a leaf")
    if tensor.cls is not torch.nn.Parameter:
        state.guards.add([tensor.source], "{0}.is_leaf", [], f"{tensor.source} is a leaf")
    return tensor.source


@attribute_store("grad")
def store_gradient(state: CaptureState, tensor: TensorValue, value: Value) -> None:
    if tensor.real is None or tensor.source is None:
        raise state.unsupported("gradient-store", f"a store to the gradient of {tensor.describe()}")
    guard_leaf(state, tensor)
    if isinstance(value, TensorValue):
        own, new = tensor.fake, value.fake
        if (own.shape, own.dtype, own.device) != (new.shape, new.dtype, new.device) or value is tensor:
            raise state.unsupported("gradient-store", f"{value.describe()} as the gradient of another form")
    elif not is_none(value):
        raise state.unsupported("gradient-store", f"{value.describe()} as a gradient")
    tensor.changes["grad"] = value
    state.effects.attribute_changed(tensor, "grad")


@attribute_read("is_leaf")
def _is_leaf(state: CaptureState, tensor: TensorValue) -> Value:
    if "data" in tensor.changes:
        return ConstantValue(True)
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
    stored: Any = tensor.changes.get("data", tensor)
    made = state.call_torch(getattr, stored, "data")
    state.graph.alias_made(stored.node, made.fake)
    return made


@attribute_store("data")
def _store_data(state: CaptureState, tensor: TensorValue, value: Value) -> None:
    """A leaf that was there before gets other memory: it is stored once the graph has run. What the graph computes from
    here on is of a copy of the leaf, for its gradients, with the new values."""
    if tensor.source is None or tensor.real is None or not isinstance(value, TensorValue) or tensor.changes:
        raise state.unsupported("data-store", f"{value.describe()} as the data of {tensor.describe()}")
    own, new = tensor.fake, value.fake
    alike = (own.shape, own.stride(), own.dtype, own.device) == (
        new.shape,
        new.stride(),
        new.dtype,
        new.device,
    )
    # What autograd has saved of a leaf has the new values, too.
    saved = any(
        isinstance(result, torch.Tensor) and result.requires_grad
        for user in tensor.node.users
        for result in tree_leaves(user.meta.get("example_value"))
    )
    if not alike or not own.is_contiguous() or saved or not _is_leaf(state, tensor).truth(state):
        raise state.unsupported("data-store", f"other data of {tensor.describe()}, or after it was used")
    with grad_mode(state, True):
        copy = state.call_torch("clone", tensor)
        data = state.call_torch(getattr, copy, "data")
        data.call_method(state, "copy_", [value.call_method(state, "detach", [], {})], {})
    note_view_copy(state, copy.node, [value.node], f"the data stored in {tensor.describe()}")
    del state.tensor_of_fake[id(copy.fake)]
    tensor.node, tensor.fake, tensor.version = copy.node, copy.fake, copy.version
    state.tensor_of_fake[id(copy.fake)] = tensor
    tensor.changes["data"] = value
    state.effects.attribute_changed(tensor, "data")
