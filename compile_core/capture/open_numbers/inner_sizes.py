"""What a graph takes for granted about tensors that wrap others: their contexts, and the sizes of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.open_numbers.size_marks import SizeMarks
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import TensorSizes
from gradsplit.compile_core.capture.values.base import CaptureState
from gradsplit.compile_core.ir.sources import AttributeSource, Source
from gradsplit.compile_core.torch_facts.wrapper_tensors import Flattened, is_wrapper


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
