"""Numbers in graphs: sizes and floats that are known when a graph runs, beside tensors.

The value of such a node under fake tensors (``meta["val"]``) is a SymInt, SymFloat or SymBool of torch; when the graph
runs it is a plain number of Python. Sizes are expressions over the symbols of a ShapeEnv, which stand for what the
graph's inputs say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch.fx import Node

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(node: Node) -> bool:
    """Whether the node holds a number and no tensor."""
    return isinstance(node.meta.get("val"), SYMBOLIC_NUMBERS)


def expression_of(number: torch.SymInt) -> sympy.Expr:
    """The number over the symbols of its ShapeEnv, with what is known of them by now."""
    return number.node.expr


def has_backed_symbols(number: torch.SymInt) -> bool:
    """Whether sizes determine the number; what is read out of a tensor's data has no value at compilation."""
    return number.node.has_hint()


@dataclass(frozen=True)
class NumberSource:
    """Where the value of a symbol is read: the input itself, or a size or stride of it."""

    position: int
    read: Literal["number", "size", "stride"]
    dim: int = 0

    def value(self, inputs: Sequence[Any]) -> int:
        given = inputs[self.position]
        if self.read == "number":
            return given
        return given.size(self.dim) if self.read == "size" else given.stride(self.dim)


def symbol_places(inputs: Sequence[Any]) -> Mapping[sympy.Symbol, NumberSource]:
    """Where each symbol is read, given a fake tensor or number for each input."""
    found: dict[sympy.Symbol, NumberSource] = {}

    def add(number: Any, place: NumberSource) -> None:
        if isinstance(number, torch.SymInt):
            expression = expression_of(number)
            if isinstance(expression, sympy.Symbol):
                found.setdefault(expression, place)

    tensors = []
    for position, given in enumerate(inputs):
        if not isinstance(given, torch.Tensor):
            add(given, NumberSource(position, "number"))
        elif given._has_symbolic_sizes_strides:
            tensors.append((position, given))
    # A stride of one dim often is the size of another, which says more.
    for position, tensor in tensors:
        for dim, size in enumerate(tensor.size()):
            add(size, NumberSource(position, "size", dim))
    for position, tensor in tensors:
        for dim, stride in enumerate(tensor.stride()):
            add(stride, NumberSource(position, "stride", dim))
    return found
