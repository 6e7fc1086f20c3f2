"""What the user says about the sizes of one tensor: ``mark_dynamic``, ``maybe_mark_dynamic``, ``mark_static``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_ATTRIBUTE = "_gradsplit_size_marks"


@dataclass
class SizeMarks:
    """``dynamic`` maps a dim to its least and greatest size, None where there is no bound."""

    dynamic: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    maybe_dynamic: set[int] = field(default_factory=set)
    static: set[int] = field(default_factory=set)


_NO_MARKS = SizeMarks()


def marks_of(tensor: torch.Tensor) -> SizeMarks:
    """The marks of a tensor, those made with torch's own functions of these names included; read only."""
    attributes = getattr(tensor, "__dict__", None)
    if not attributes:
        return _NO_MARKS
    marks = attributes.get(_ATTRIBUTE, _NO_MARKS)
    count = tensor.dim()

    def of_torch(name: str) -> set[int]:
        return {dim % count for dim in attributes.get(name, ())}

    dynamic = dict.fromkeys(of_torch("_dynamo_dynamic_indices"), (None, None))
    dynamic |= {one.dim % count: (one.min, one.max) for one in attributes.get("_dynamo_dynamic_range", ())}
    return SizeMarks(
        dynamic | marks.dynamic,
        marks.maybe_dynamic | of_torch("_dynamo_weak_dynamic_indices"),
        marks.static | of_torch("_dynamo_static_indices"),
    )


def mark_dynamic(
    tensor: torch.Tensor, index: int | Sequence[int], min: int | None = None, max: int | None = None
) -> None:
    """Says that these dims differ between calls, so that the first capture already leaves them open.

    Args:
        tensor: an argument of a compiled function.
        index: one dim, or several.
        min: the least size that will come, if known; for all the dims given.
        max: the greatest.

    Raises:
        IndexError: the tensor has no such dim.
        TypeError: it is no tensor.
        CompileError: raised later, by the compiled call, if the program only works for this one size.
    """
    for position in _dims(tensor, index):
        marks = _own_marks(tensor, position)
        marks.dynamic[position] = (min, max)


def maybe_mark_dynamic(tensor: torch.Tensor, index: int | Sequence[int]) -> None:
    """As ``mark_dynamic``, but a program that needs one particular size makes it static without an error."""
    for position in _dims(tensor, index):
        _own_marks(tensor, position).maybe_dynamic.add(position)


def mark_static(tensor: torch.Tensor, index: int | Sequence[int] | None = None) -> None:
    """Says that these dims (all of them by default) stay: another size always compiles another entry."""
    for position in _dims(tensor, index):
        _own_marks(tensor, position).static.add(position)


@contextmanager
def marked(tensor: torch.Tensor, dims: Mapping[int, tuple[int | None, int | None]]) -> Iterator[None]:
    """Inside, these dims are dynamic, with their least and greatest size, and the tensor has no other marks of ours."""
    attributes: Any = tensor.__dict__
    before = attributes.pop(_ATTRIBUTE, None)
    try:
        for dim, (least, greatest) in dims.items():
            mark_dynamic(tensor, dim, least, greatest)
        yield
    finally:
        attributes.pop(_ATTRIBUTE, None)
        if before is not None:
            setattr(tensor, _ATTRIBUTE, before)


def _dims(tensor: torch.Tensor, index: int | Sequence[int] | None) -> list[int]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the sizes of tensors are marked, not of {tensor!r}")
    given = range(tensor.dim()) if index is None else [index] if isinstance(index, int) else index
    for position in given:
        if not -tensor.dim() <= position < tensor.dim():
            raise IndexError(f"dim {position} of a tensor with {tensor.dim()} dims")
    return [position % tensor.dim() for position in given]


def _own_marks(tensor: torch.Tensor, position: int) -> SizeMarks:
    """The marks of a tensor, to be changed; the last mark of a dim is the one that counts."""
    marks = getattr(tensor, _ATTRIBUTE, None)
    if marks is None:
        marks = SizeMarks()
        setattr(tensor, _ATTRIBUTE, marks)
    marks.dynamic.pop(position, None)
    marks.maybe_dynamic.discard(position)
    marks.static.discard(position)
    return marks
