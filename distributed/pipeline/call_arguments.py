"""The tensors of a call that a stage reads itself: those of the model's arguments, by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.export.structures import Structure, collect
from gradsplit.distributed.pipeline.layout import PipelineLayout


def read_call(
    exported: Exported | PipelineLayout, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, torch.Tensor]:
    """The tensors of a call of the model, or of a part of one, by their positions among ``exported.arguments``.

    Raises:
        ValueError: an argument is not as it was exported.
    """
    exported_args, exported_kwargs = (
        part[kind] for part, kind in zip(exported.call["tuple"], ("tuple", "dict"), strict=True)
    )
    names = exported.parameter_names
    by_name: dict[str, tuple[str, Structure]] = {
        name: (f"args[{k}]", item) for k, (name, item) in enumerate(zip(names, exported_args, strict=False))
    }
    by_name |= {key: (f"kwargs[{key!r}]", item) for key, item in exported_kwargs}
    found: dict[int, torch.Tensor] = {}
    given: list[tuple[str, Structure, Any]] = []
    for k, value in enumerate(args):
        if k < len(exported_args):
            given.append((f"args[{k}]", exported_args[k], value))
        elif k < len(names) and names[k] in by_name:
            given.append((*by_name[names[k]], value))
        else:
            raise ValueError(
                f"{exported.name} was exported with {len(exported_args)} arguments by position, not {len(args)}"
            )
    for key, value in kwargs.items():
        if key not in by_name:
            raise ValueError(
                f"{exported.name} was exported without the argument {key}; it takes {', '.join(by_name)}"
            )
        given.append((*by_name[key], value))
    for place, structure, value in given:
        tensors: list[torch.Tensor] = []
        collect(structure, value, place, tensors)
        for position, tensor in zip(_positions(structure), tensors, strict=True):
            exported.arguments[position].check(tensor)
            found[position] = tensor
    return found


def _positions(structure: Structure) -> list[int]:
    """The positions of a structure's tensors, in its order."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return [content]
    if kind == "value":
        return []
    if kind in ("tuple", "list"):
        items = content
    elif kind == "named":
        items = content[2]
    else:
        items = [item for _, item in (content if kind == "dict" else content[1])]
    return [position for item in items for position in _positions(item)]
