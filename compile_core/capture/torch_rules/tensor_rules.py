"""Tensor methods that change metadata in place, and functions that answer from metadata."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn.functional import one_hot

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule, rule_of_each
from gradsplit.compile_core.capture.values.constants import ConstantValue, as_value, is_none
from gradsplit.compile_core.capture.values.tensors import (
    METHOD_RULES,
    TensorValue,
    attribute_store,
    method_rule,
)
from gradsplit.compile_core.ir.made_parameters import made_parameter
from gradsplit.compile_core.torch_facts.dispatcher import is_alias_of

_METADATA_CHANGES = (
    "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_",
)  # fmt: skip


def _is_own(state: CaptureState, tensor: TensorValue) -> bool:
    """Whether the graph under construction made the tensor: nobody outside knows its metadata yet."""
    own = tensor.node.op != "placeholder" and tensor.node.graph is state.graph.graph
    return own and not tensor.is_shared


def _change(
    state: CaptureState, name: str, tensor: TensorValue, args: Sequence[Value], kwargs: dict[str, Value]
) -> Node:
    given = tuple(value.graph_argument(state) for value in args)
    named = {key: value.graph_argument(state) for key, value in kwargs.items()}
    return state.graph.call("call_method", name, (tensor.node, *given), named, state.stack_trace())


def _change_metadata(
    name: str, state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value
) -> Value | None:
    if not _is_own(state, tensor):
        return None
    if not torch.is_grad_enabled() or not _has_views(state, tensor):
        _change(state, name, tensor, args, kwargs)
        return tensor
    # Functional tensors would take the views, and their gradients, for those of the changed tensor.
    view = _change(state, name.removesuffix("_"), tensor, args, kwargs)
    tensor.node, tensor.fake = view, view.meta["example_value"]
    state.tensor_of_fake[id(tensor.fake)] = tensor
    return tensor


METHOD_RULES.update({name: functools.partial(_change_metadata, name) for name in _METADATA_CHANGES})


def _has_views(state: CaptureState, tensor: TensorValue) -> bool:
    """Whether another tensor of the program lies in its memory."""
    others = (other for other in state.tensor_of_fake.values() if other is not tensor)
    return any(is_alias_of(tensor.fake, other.fake) for other in others)


@method_rule("requires_grad_")
def _requires_grad(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    (wanted,) = (*args, *kwargs.values()) or (ConstantValue(True),)
    if not isinstance(wanted, ConstantValue) or type(wanted.value) is not bool:
        return None
    if wanted.value == tensor.fake.requires_grad:
        return tensor
    # A tensor that exists keeps its metadata, and only leaves may change.
    if not _is_own(state, tensor) or not tensor.fake.is_leaf:
        return None
    _change(state, "requires_grad_", tensor, [wanted], {})
    return tensor


@answer_to(torch.nn.Parameter)
def _parameter(state: CaptureState, data: Value, requires_grad: Value | None = None) -> Value:
    """A leaf in the memory of a tensor. What the program keeps of it, a graph hands out as its backend runs it."""
    if not isinstance(data, TensorValue) or data.cls not in (torch.Tensor, torch.nn.Parameter):
        raise state.unsupported("parameter", f"a parameter of {data.describe()}")
    wanted = [] if requires_grad is None else [requires_grad.truth(state)]
    made = state.call_torch(made_parameter, data, *wanted)
    made.cls = torch.nn.Parameter
    return made


@attribute_store("requires_grad")
def _store_requires_grad(state: CaptureState, tensor: TensorValue, value: Value) -> None:
    """Unlike the method it says nothing of what has a history."""
    if not tensor.get_attribute(state, "is_leaf").truth(state):
        raise state.unsupported(
            "attribute-store", f"'requires_grad' of {tensor.describe()}, which is no leaf"
        )
    tensor.call_method(state, "requires_grad_", [value], {})


@method_rule("contiguous")
def _contiguous(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    """What was changed in place has no gaps in the traced program, where this would be the tensor itself then."""
    wanted = [value.as_constant() for value in (*args, *kwargs.values())] or [torch.contiguous_format]
    if not tensor.fake._version or tensor.fake.is_contiguous(memory_format=wanted[0]):
        return None
    return tensor.call_method(state, "clone", [], {"memory_format": state.from_constant(wanted[0])})


@method_rule("storage_offset")
def _storage_offset(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value:
    _guard_beginning(state, tensor)
    return state.from_constant(tensor.fake.storage_offset())


@method_rule("as_strided")
def _as_strided(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    """``as_strided`` counts its offset from the start of the storage; a graph only knows where an input itself starts.

    Strides are those of the storage. Of an input a graph has only what that spans, and what lies in another order
    than rows may change it as the graph's writes become operators that return new tensors.
    """
    offset = kwargs.get("storage_offset", args[2] if len(args) > 2 else None)
    if offset is not None and not is_none(offset) and _guard_beginning(state, tensor):
        raise state.unsupported("storage-offset", f"as_strided with an offset in {tensor.describe()}")
    examples = (record.entry.example for record in state.graph.records)
    own = tensor.fake if tensor.fake._base is None else tensor.fake._base
    whole = next((e for e in examples if isinstance(e, torch.Tensor) and is_alias_of(e, tensor.fake)), own)
    found = state.call_torch("as_strided", tensor, *args, **kwargs)
    if not whole.is_contiguous() or _end(found.fake) > whole.storage_offset() + whole.numel():
        raise state.unsupported(
            "strided-view", f"as_strided in other memory than the rows of {tensor.describe()}"
        )
    return found


def _end(tensor: torch.Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(steps) + 1) if tensor.numel() else 0


@call_rule(one_hot)
def _one_hot(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Lies row-major whatever the classes' order in memory is; torch's form for fake tensors keeps that."""
    if args and isinstance(args[0], TensorValue) and not args[0].fake.is_contiguous():
        args = [state.call_torch("contiguous", args[0]), *args[1:]]
    return state.call_tensor_op("call_function", one_hot, args, kwargs)


@method_rule("fill_diagonal_")
def _fill_diagonal(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    """Torch strides to the diagonal, from where the storage begins."""
    if _guard_beginning(state, tensor):
        raise state.unsupported("storage-offset", f"fill_diagonal_ of a part of {tensor.describe()}")
    return None


def _guard_beginning(state: CaptureState, tensor: TensorValue) -> int:
    """Guards where in its storage an input begins, if ``tensor`` lies in an input's memory."""
    for record in state.graph.records:
        example = record.entry.example
        if isinstance(example, torch.Tensor) and is_alias_of(example, tensor.fake):
            offset = int(example.storage_offset())
            source = record.entry.source
            condition = f"{{0}}.storage_offset() == {offset}"
            state.guards.add([source], condition, [], f"{source} begins at element {offset} of its storage")
            return offset
    return 0


@call_rule(torch.as_strided)
def _as_strided_function(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if args and isinstance(args[0], TensorValue):
        return args[0].call_method(state, "as_strided", args[1:], kwargs)
    return state.call_tensor_op("call_function", torch.as_strided, args, kwargs)


METHOD_RULES.update(
    {
        "__getitem__": lambda state, tensor, key: tensor.get_item(state, key),
        "__setitem__": lambda state, tensor, key, value: as_value(tensor.set_item(state, key, value)),
    }
)


@rule_of_each(
    *(torch.result_type, torch.is_same_size, torch.is_signed, torch.is_floating_point, torch.is_complex),
    *(torch.is_conj, torch.numel, torch.finfo, torch.iinfo),
)
def _of_metadata(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    def real(value: Value) -> Any:
        return value.fake if isinstance(value, TensorValue) else value.as_constant()

    return state.from_constant(
        function(*map(real, args), **{key: real(value) for key, value in kwargs.items()})
    )
