"""``tensor[key]`` where the key has integers that tensors hold, or that were read out of them: ``logits[row, target]``.

Torch reads such a number out of its tensor and selects. A graph takes the items by the tensors themselves instead: that
is a copy where plain Python has a view, unless another index makes a copy anyway.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicInt, is_of_data
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import DATA_DEPENDENT_RULES
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.tensors import METHOD_RULES, TensorValue
from gradsplit.compile_core.capture.values.view_copies import note_view_copy, stored_back
from gradsplit.compile_core.torch_facts.symbolic_numbers import assume

_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8)
_WHOLE = SliceValue([ConstantValue(None)] * 3)


def _index_by_numbers(state: CaptureState, args: list[Any]) -> Value | None:
    """The item, or the store; None where the key has no such number, or something beside it that has no rule here."""
    if not isinstance(args[0], TensorValue):
        return None
    tensor, key, *stored = args
    parts: list[Any] = key.all(state) if isinstance(key, SequenceValue) and key.cls is tuple else [key]
    # An integer out of a tensor, in a tensor again.
    parts = [
        state.call_torch(torch.full, (), part, dtype=torch.int64) if is_of_data(part) else part
        for part in parts
    ]
    numbers = [part for part in parts if _is_number(part)]
    dims = _dims_taken(tensor, parts)
    read = [
        _with_numbers(state, part, tensor.fake.shape[place] if count == 1 else 0)
        for part, count, place in zip(parts, dims or (), _positions(dims or []), strict=False)
    ]
    if dims is not None and read != parts:
        function = operator.setitem if stored else operator.getitem
        return state.call_torch(function, tensor, tuple(read), *stored)
    known = all(part.fake.device in (tensor.fake.device, _CPU) for part in numbers)
    if not numbers or dims is None or not known:
        return None
    if stored:
        return _store(state, tensor, parts, dims, stored[0])
    places = _places(state, tensor, parts, dims)
    taken = state.call_torch(torch.ops.aten.index.Tensor, tensor, places)
    rest = [part for part in parts if not _is_number(part)]
    if not any(isinstance(part, TensorValue | SequenceValue) or _is_bool(part) for part in rest):
        what = "a view at an index that a tensor holds"
        # A view requires gradients where it is made without, too.
        keeps_gradients = taken.fake.requires_grad == tensor.fake.requires_grad
        key = _key(tensor, places) if keeps_gradients else ()
        note_view_copy(state, taken.node, [tensor.node], what, key)
    return taken if not rest else taken.get_item(state, SequenceValue(rest, tuple))


DATA_DEPENDENT_RULES.update({operator.getitem: _index_by_numbers, operator.setitem: _index_by_numbers})

_CPU = torch.device("cpu")


def _with_numbers(state: CaptureState, part: Any, size: Any) -> Any:
    """A slice whose ends tensors hold, with these read; anything else as it is. The ends are assumed to lie within the
    dim, in order: then the size is their difference, the same for all slices between them."""
    if not isinstance(part, SliceValue) or not any(map(_is_number, part.parts)):
        return part
    read: list[Any] = [
        METHOD_RULES["__index__"](state, end) if _is_number(end) else end for end in part.parts
    ]
    if None in read or not is_none(read[2]):
        return part
    places: list[Any] = [
        end.number if isinstance(end, SymbolicInt) else end.as_constant() for end in read[:2]
    ]
    places = [0, *(place for place in places if place is not None), size]
    try:
        for first, second in itertools.combinations(places, 2):
            assume(first <= second)
    except RuntimeError as error:
        raise state.unsupported("data-dependent-size", f"a slice of more than there is: {error}") from error
    # Before the slice, whose size follows from them.
    state.graph.write_checks()
    return SliceValue(read)


def _key(tensor: TensorValue, places: list[Any]) -> tuple[Any, ...]:
    return (tensor.node, *(place.node if isinstance(place, TensorValue) else None for place in places))


def _store(
    state: CaptureState, tensor: TensorValue, parts: list[Any], dims: list[int], value: Value
) -> Value | None:
    if any(
        isinstance(part, SequenceValue) or _is_bool(part)
        or (isinstance(part, TensorValue) and not _is_number(part)) for part in parts
    ):  # fmt: skip
        return None
    basic = [_WHOLE if _is_number(part) else part for part in parts]
    place: Any = tensor
    if any(part is not _WHOLE for part in basic):
        place = tensor.get_item(state, SequenceValue([*basic], tuple))
    # Integers take their dim away; of what is left, None has a dim that took none.
    kept = [
        0 if _is_int(part) else 1 if is_none(part) else dim for part, dim in zip(parts, dims, strict=True)
    ]
    places = _places(state, place, parts, kept)
    dtype, device = tensor.fake.dtype, tensor.fake.device
    if isinstance(value, TensorValue):
        rest = place.fake.dim() - sum(map(_is_number, parts))
        if value.fake.dim() > rest or value.fake.device != device:
            return None
        if value.fake.dtype != dtype:
            value = state.call_torch("to", value, dtype)
    elif type(getattr(value, "value", None)) in (bool, int, float):
        value = state.call_torch(torch.tensor, value, dtype=dtype, device=device)
    else:
        return None
    state.call_torch(torch.ops.aten.index_put_.default, place, places, value)
    if place is tensor and isinstance(value, TensorValue):
        stored_back(state, value.node, _key(tensor, places))
    return ConstantValue(None)


def _dims_taken(tensor: TensorValue, parts: list[Any]) -> list[int] | None:
    """How many dims of the tensor each part of a key takes; None where that is not known here."""
    taken = []
    for part in parts:
        if isinstance(part, TensorValue):
            taken.append(part.fake.dim() if part.fake.dtype in _MASKS else 1)
        elif is_none(part) or _is_bool(part):
            taken.append(0)
        elif _is_int(part) or isinstance(part, SliceValue):
            taken.append(1)
        elif isinstance(part, ConstantValue) and part.value is Ellipsis:
            taken.append(-1)
        else:
            return None
    rest = tensor.fake.dim() - sum(count for count in taken if count > 0)
    if rest < 0 or taken.count(-1) > 1:
        return None
    return [rest if count == -1 else count for count in taken]


def _positions(dims: list[int]) -> list[int]:
    return [sum(dims[:index]) for index in range(len(dims))]


def _places(state: CaptureState, tensor: TensorValue, parts: list[Any], dims: list[int]) -> list[Any]:
    """The number that each dim of the tensor is indexed by, None where the key has none for it."""
    places: list[Any] = [None] * tensor.fake.dim()
    for part, dim in zip(parts, _positions(dims), strict=True):
        if _is_number(part):
            is_index = part.fake.dtype is torch.int64
            places[dim] = part if is_index else state.call_torch("to", part, torch.int64)
    return places


def _is_number(part: Any) -> bool:
    return isinstance(part, TensorValue) and part.fake.dim() == 0 and part.fake.dtype in _NUMBERS


def _is_int(part: Any) -> bool:
    return isinstance(part, ConstantValue) and part.python_type() is int


def _is_bool(part: Any) -> bool:
    return isinstance(part, ConstantValue) and part.python_type() is bool
