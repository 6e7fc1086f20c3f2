"""``torch.func`` transforms as nodes: the real transform is applied to a body when the node runs.

A node has tensors for arguments and a flat tuple of tensors for results. Between them and what the transform takes and
gives stand templates: nested tuples, lists and dictionaries with ``Slot`` in the places of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Slot:
    """The place of a tensor."""

    index: int


def fill(template: Any, tensors: Sequence[Any]) -> Any:
    """The structure with the tensors in their places."""
    return pytree.tree_map(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, template)


def _slots_of(template: Any, structure: Any) -> list[Any]:
    """What lies in the slots of a structure like the template, in the order of their numbers."""
    pairs = zip(pytree.tree_leaves(template), pytree.tree_leaves(structure), strict=True)
    found = {leaf.index: value for leaf, value in pairs if isinstance(leaf, Slot)}
    return [found[index] for index in range(len(found))]


@dataclass(frozen=True)
class Transform:
    """A transform with its options, and the structures around it.

    Attributes:
        function: ``torch.func.grad``, ``torch.vmap`` and so on: takes a function and ``options``, gives a function.
        options: keywords of the transform.
        arguments: template of the positional arguments and keywords of the transformed function.
        body_arguments: template of those of the function itself.
        result: template of what the function returns.
        num_arguments: how many of the node's tensors fill ``arguments``; the body reads the others as they are.
    """

    function: Callable[..., Callable[..., Any]]
    options: dict[str, Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    body_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    num_arguments: int

    def __call__(self, body: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """What the transformed function returns."""
        passed, lifted = tensors[: self.num_arguments], tensors[self.num_arguments :]

        def function(*args: Any, **kwargs: Any) -> Any:
            return fill(self.result, body(*_slots_of(self.body_arguments, (args, kwargs)), *lifted))

        args, kwargs = fill(self.arguments, passed)
        return self.function(function, **self.options)(*args, **kwargs)


def transformed(body: Callable[..., Any], transform: Transform, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Call the transformed body; the leaves of what it returns."""
    return tuple(pytree.tree_leaves(transform(body, tensors)))


def vjp(function: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """``torch.func.vjp`` in the form of the other transforms."""
    return lambda *primals: torch.func.vjp(function, *primals, has_aux=has_aux)


def jvp(function: Callable[..., Any], *, strict: bool = False, has_aux: bool = False) -> Callable[..., Any]:
    """``torch.func.jvp`` in the form of the other transforms."""
    return lambda primals, tangents: torch.func.jvp(
        function, primals, tangents, strict=strict, has_aux=has_aux
    )


def pull_back(
    function: Callable[..., Any], cotangents: Any, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Call what ``torch.func.vjp`` returned last; ``cotangents`` is a template."""
    return tuple(pytree.tree_leaves(function(*fill(cotangents, tensors))))
