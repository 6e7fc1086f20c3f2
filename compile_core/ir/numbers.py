"""Numbers in graphs: sizes and floats that are known when a graph runs, beside tensors.

The value of such a node under fake tensors (``meta["val"]``) is a SymInt, SymFloat or SymBool of torch; when the graph
runs it is a plain number of Python. Sizes are expressions over the symbols of a ShapeEnv, which stand for what the
graph's inputs say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.torch_facts.symbolic_numbers import depends_on_data, value_at_compilation

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(node: Node) -> bool:
    """Whether the node holds a number and no tensor."""
    return isinstance(node.meta.get("val"), SYMBOLIC_NUMBERS)


def is_sized_by_data(value: Any) -> bool:
    """Whether the result of a node is, or has in it, a number that is only known when the graph has read data, or a
    tensor of such a size."""
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides and depends_on_data(value)
    if isinstance(value, (tuple, list)):
        return any(map(is_sized_by_data, value))
    return isinstance(value, SYMBOLIC_NUMBERS) and depends_on_data(value)


def has_open_sizes(module: GraphModule) -> bool:
    """Whether a size of a value is open, or a number is in the graph."""
    return any(
        is_number(node) or getattr(node.meta.get("val"), "_has_symbolic_sizes_strides", False)
        for node in module.graph.nodes
    )


def expression_of(number: torch.SymInt) -> sympy.Expr:
    """The number over the symbols of its ShapeEnv, with what is known of them by now."""
    return number.node.expr


def symbols_of(expression: sympy.Basic) -> set[sympy.Symbol]:
    """The sizes in an expression."""
    return {symbol for symbol in expression.free_symbols if isinstance(symbol, sympy.Symbol)}


def numbers_from_sizes(module: GraphModule, given: Collection[str] = ()) -> set[Node]:
    """The numbers in a graph that sizes determine; other numbers are floats that come with each run, or data.

    Args:
        given: names of such numbers among the inputs.
    """
    found: set[Node] = set()
    for node in filter(is_number, module.graph.nodes):
        number, reads = node.meta["val"], node.all_input_nodes
        if (
            node.name in given
            or (isinstance(number, torch.SymInt) and has_backed_symbols(number))
            or (node.op != "placeholder" and all(read in found for read in reads))
        ):
            found.add(node)
    return found


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


class SizeReader:
    """Reads the values of symbols off the inputs that they describe.

    A symbol that no size, stride or number is by itself is found from a size that is a multiple of it, plus a constant.

    Args:
        examples: a fake tensor or number for each input.

    Attributes:
        at_compilation: the values in the call that is compiled for.
    """

    def __init__(self, examples: Sequence[Any]) -> None:
        self.places = dict(symbol_places(examples))
        # By symbol: where a size is read, and the factor and the constant that make the size of the symbol.
        self._solved: dict[sympy.Symbol, tuple[NumberSource, int, int]] = {}
        for position, given in enumerate(examples):
            if isinstance(given, torch.Tensor) and given._has_symbolic_sizes_strides:
                for dim, size in enumerate(given.shape):
                    self._solve(size, NumberSource(position, "size", dim))
            else:
                self._solve(given, NumberSource(position, "number"))
        sources = [*self.places.values(), *(place for place, _, _ in self._solved.values())]
        self.at_compilation = self._solve_all([value_at_compilation(s.value(examples)) for s in sources])

    def _solve(self, size: Any, place: NumberSource) -> None:
        if not isinstance(size, torch.SymInt):
            return
        expression = expression_of(size)
        if len(symbols_of(expression)) != 1:
            return
        (symbol,) = symbols_of(expression)
        if symbol in self.places or symbol in self._solved:
            return
        constant = expression.as_coeff_Add()[0]
        factor = (expression - constant) / symbol
        if factor.is_Integer and factor != 0 and constant.is_Integer:
            self._solved[symbol] = (place, int(factor), int(constant))

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """What is read, in the order of the values."""
        return (*self.places, *self._solved)

    def values(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of the symbols for these inputs."""
        read = tuple(place.value(inputs) for place in self.places.values())
        if not self._solved:
            return read
        return self._solve_all([*read, *(place.value(inputs) for place, _, _ in self._solved.values())])

    def _solve_all(self, read: Sequence[int]) -> tuple[int, ...]:
        solved = zip(read[len(self.places) :], self._solved.values(), strict=True)
        return (
            *read[: len(self.places)],
            *((value - constant) // factor for value, (_, factor, constant) in solved),
        )


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
    # The stride of a dim of one element says nothing: whoever makes such a tensor may give it any.
    for of_one_element in (False, True):
        for position, tensor in tensors:
            for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
                if (isinstance(size, int) and size == 1) == of_one_element:
                    add(stride, NumberSource(position, "stride", dim))
    return found
