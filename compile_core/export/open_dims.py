"""``dynamic_shapes``: which sizes of an exported call may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from gradsplit.compile_core.capture.open_numbers.size_marks import marked, marks_of
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.captured import CapturedFrame


@dataclass(frozen=True)
class OpenDims:
    """Tensors of a call with the dims that are marked as open."""

    marked: tuple[tuple[torch.Tensor, str, tuple[int, ...]], ...]

    def dims_of(self) -> dict[int, tuple[int, ...]]:
        """The open dims by the identity of the tensor."""
        return {id(tensor): dims for tensor, _, dims in self.marked}

    def check(self, frame: CapturedFrame) -> None:
        """Raises CompileError where a dim is not open that should be."""
        assert frame.graph is not None
        if self.marked and frame.late_guards is None:
            _, place, dims = self.marked[0]
            raise CompileError(
                f"sizes of {place} (dims {', '.join(map(str, dims))}) are to differ, but the program as "
                f"captured only works "
                f"for those of this call"
            )


@contextmanager
def open_dims(
    dynamic_shapes: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[OpenDims]:
    """Inside, the tensors are marked with what ``dynamic_shapes`` says of them."""
    with ExitStack() as stack:
        for value, _, dims in _pairs(dynamic_shapes, args, kwargs, names):
            stack.enter_context(marked(value, dims))
        found = [
            (value, place, tuple(sorted(marks_of(value).dynamic)))
            for value, place in _tensors((args, kwargs))
        ]
        yield OpenDims(tuple(entry for entry in found if entry[2]))


def _pairs(
    dynamic_shapes: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[torch.Tensor, str, dict[int, tuple[int | None, int | None]]]]:
    if dynamic_shapes is None:
        return
    given = {**dict(zip((*names, *range(len(names), len(args))), args, strict=False)), **kwargs}
    if isinstance(dynamic_shapes, (tuple, list)):
        dynamic_shapes = dict(zip(given, dynamic_shapes, strict=False))
    if not isinstance(dynamic_shapes, Mapping):
        raise TypeError(f"dynamic_shapes is a dictionary by argument, or a tuple, not {dynamic_shapes!r}")
    for name, shapes in dynamic_shapes.items():
        if name not in given:
            raise ValueError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(map(str, given))}")
        yield from _inside(given[name], shapes, str(name))


def _inside(value: Any, shapes: Any, place: str) -> Iterator[tuple[torch.Tensor, str, dict[int, Any]]]:
    if shapes is None:
        return
    if isinstance(value, torch.Tensor):
        entries = shapes if isinstance(shapes, Mapping) else dict(enumerate(shapes))
        found = {
            dim: bounds
            for dim, said in entries.items()
            if (bounds := _bounds(said, place, dim, value)) is not None
        }
        yield value, place, found
        return
    keys = (
        value
        if isinstance(value, Mapping)
        else range(len(value))
        if isinstance(value, (tuple, list))
        else None
    )
    if keys is None:
        raise ValueError(f"dynamic_shapes of {place}, which is no tensor, is None")
    for key in keys:
        inner = shapes.get(key) if isinstance(shapes, Mapping) else shapes[key]
        yield from _inside(value[key], inner, f"{place}[{key!r}]")


def _bounds(said: Any, place: str, dim: int, tensor: torch.Tensor) -> tuple[int | None, int | None] | None:
    """The least and greatest size that a dim may have; None for a dim that stays."""
    hint = getattr(getattr(said, "type", None), "name", "")  # of Dim.DYNAMIC, Dim.AUTO and Dim.STATIC
    if said is None or isinstance(said, int) or hint == "STATIC":
        return None
    if hint:
        return None, None
    least, greatest = getattr(said, "min", None), getattr(said, "max", None)
    if least is None:
        raise TypeError(f"dim {dim} of {place}: a torch.export.Dim, Dim.DYNAMIC or None, not {said!r}")
    return (least if least > 2 else None), (greatest if isinstance(greatest, int) else None)


def _tensors(call: tuple[Sequence[Any], Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
    pairs: list[Any] = tree_flatten_with_path(call)[0]
    for path, leaf in pairs:
        if isinstance(leaf, torch.Tensor):
            yield leaf, ("args", "kwargs")[path[0].idx] + keystr(path[1:])
