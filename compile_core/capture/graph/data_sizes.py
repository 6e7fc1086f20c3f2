"""Sizes and integers that depend on data: where each symbol is read in the graph, and what is checked of them.

Fake tensors give a new symbol for each number that they would have to read, such as the length of ``nonzero``. In the
graph it is the node of the number itself, or a size of the tensor that has it. What shape rules or the program assume
of such numbers cannot be a guard before the call; the ShapeEnv keeps it as an assertion, and each becomes a check in
the graph (``ir/data_checks``). If one fails the graph raises, and the call is made again as plain Python.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from gradsplit.compile_core.torch_facts.symbolic_numbers import Assertions, symbols_read_off

MakeNode = Callable[[Callable[..., Any] | str, tuple[Any, ...], Any], fx.Node]


@dataclass(frozen=True)
class _Place:
    """Where a symbol is read: in the result of a node, or in the part at ``index``; see ``symbols_read_off``."""

    node: fx.Node
    index: int | None
    read: str
    dim: int
    number: Any


class DataSizes:
    """Those of one graph under construction; a body has those of the graph ``outer``, too."""

    def __init__(self, outer: DataSizes | None = None) -> None:
        self._places: ChainMap[sympy.Symbol, _Place] = (
            ChainMap() if outer is None else outer._places.new_child()
        )
        self._assertions = Assertions() if outer is None else outer._assertions

    def note(self, node: fx.Node) -> None:
        """Take in the symbols of a result. The first that has one is that of the operation which made it."""
        example = node.meta["example_value"]
        parts = list(enumerate(example)) if isinstance(example, (tuple, list)) else [(None, example)]
        for index, part in parts:
            for symbol, read, dim, number in symbols_read_off(part):
                self._places.setdefault(symbol, _Place(node, index, read, dim, number))

    def leaf(self, symbol: sympy.Symbol, graph: fx.Graph, make_node: MakeNode) -> fx.Node:
        """The node of a symbol; ``make_node`` appends that of a number to ``graph``.

        Raises:
            NotImplementedError: no tensor that the graph makes or can be given says what it is.
        """
        place = self._places.get(symbol)
        is_number = place is not None and (place.read == "number" or place.index is not None)
        if place is None or (is_number and place.node.graph is not graph):
            raise NotImplementedError(f"no tensor has the size {symbol}")
        node = place.node
        if place.index is not None:
            node = make_node(operator.getitem, (node, place.index), node.meta["example_value"][place.index])
        if place.read == "number":
            return node
        return make_node(place.read, (node, place.dim) if place.read == "size" else (node,), place.number)

    def are_sizes(self, symbols: Iterable[sympy.Symbol]) -> bool:
        """Whether all are sizes of what operations gave."""
        return all(symbol in self._places and self._places[symbol].read == "size" for symbol in symbols)

    def new_assertions(self, env: Any) -> list[sympy.Basic]:
        """What is assumed since this was last asked."""
        return self._assertions.take_new(env)
