"""A case of a guard: a change of what a function read must be noticed, and a change beside that must cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gradsplit

X = torch.arange(6.0).reshape(2, 3)


@dataclass
class Case:
    """A function of ``world``; ``read`` changes what it read, ``unread`` something beside that."""

    function: Callable[..., Any]
    world: Callable[[], Any]
    read: Callable[[Any], Any]
    unread: Callable[[Any], Any]


class Bag:
    """Holds what it is given."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def put(owner: Any, name: str, value: Any) -> None:
    """An assignment as an expression."""
    setattr(owner, name, value)


def values(result: Any) -> Any:
    """Something that compares."""
    if result.device.type == "meta" or result.layout != torch.strided:
        return result.shape, result.device, result.layout
    return repr(result.tolist()), result.dtype  # nan is nan


def call(function: Callable[..., Any], world: Any) -> Any:
    try:
        return values(function(world))
    except Exception as error:
        return type(error), str(error)


def check_case(case: Case) -> None:
    """The compiled function does as the plain one before and after both changes; only ``read`` needs another entry."""
    plain, compiled_world = case.world(), case.world()
    if isinstance(plain, nn.Module):
        compiled_world.load_state_dict(plain.state_dict())
    compiled = gradsplit.compile(case.function, backend="eager")
    assert call(compiled, compiled_world) == call(case.function, plain)
    assert len(compiled.entries) == 1
    for world in (plain, compiled_world):
        case.unread(world)
    assert call(compiled, compiled_world) == call(case.function, plain)
    assert len(compiled.entries) == 1, "a change of what was not read costs nothing"
    first = compiled.entries[0]
    for world in (plain, compiled_world):
        case.read(world)
    assert type(first.check(compiled_world)) is not list
    assert call(compiled, compiled_world) == call(case.function, plain)
