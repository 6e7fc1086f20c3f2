"""A captured graph cut into pieces that run one after the other.

Each piece is a graph of its own, which takes what it needs of the whole graph's inputs and of earlier pieces' results.
Only tensors are results of a piece. Numbers that the program computed from sizes are computed again where a later
piece needs them, from the symbols of the whole graph's inputs; an autocast region that a cut lies in is left at the
end of one piece and entered at the beginning of the next. Other modes must be as at the beginning where a cut is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.number_nodes import number_node
from gradsplit.compile_core.ir.numbers import NumberSource, expression_of, has_backed_symbols, symbol_places
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module
from gradsplit.compile_core.torch_facts.random_state import draws_returned_on_error
from gradsplit.compile_core.torch_facts.thread_state import enter_autocast, exit_autocast


@dataclass(frozen=True)
class Piece:
    """A part of a graph.

    Attributes:
        module: takes ``inputs`` and returns a flat tuple of tensors.
        inputs: names of the whole graph's nodes, or where the whole graph's inputs determine a symbol.
        outputs: names of the whole graph's nodes.
        forgotten: names that no later piece needs, nor the graph's result.
    """

    module: GraphModule
    inputs: tuple[str | NumberSource, ...]
    outputs: tuple[str, ...]
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkedPieces:
    """Pieces that run one after the other, as the graph that they were cut from.

    Attributes:
        inputs: names of the graph's placeholders.
        outputs: names of its results.
        pieces: what is called for each piece, with what it takes and returns.
        gives_back_draws: where a piece raises the call is made again as plain Python, so random numbers that earlier
            pieces drew from the CPU's generator are given back.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pieces: tuple[tuple[Piece, Callable[..., Sequence[torch.Tensor]]], ...]
    gives_back_draws: bool

    def __call__(self, *given: Any) -> tuple[torch.Tensor, ...]:
        with draws_returned_on_error() if self.gives_back_draws else nullcontext():
            return self._run(given)

    def _run(self, given: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.inputs, given, strict=True))
        for piece, run in self.pieces:
            taken = [values[name] if isinstance(name, str) else name.value(given) for name in piece.inputs]
            results = run(*taken)
            del taken
            values.update(zip(piece.outputs, results, strict=True))
            del results
            for name in piece.forgotten:
                del values[name]
        return tuple(values[name] for name in self.outputs)


def link_pieces(
    module: GraphModule,
    pieces: Sequence[Piece],
    runs: Sequence[Callable[..., Any]],
    gives_back_draws: bool = False,
) -> LinkedPieces:
    """Joins what the pieces of ``module`` were compiled to."""
    (output,) = module.graph.find_nodes(op="output")
    # Hooks on all modules of the program are not for these.
    runs = [run.forward if isinstance(run, GraphModule) else run for run in runs]
    return LinkedPieces(
        tuple(node.name for node in module.graph.find_nodes(op="placeholder")),
        tuple(node.name for node in output.args[0]),
        tuple(zip(pieces, runs, strict=True)),
        gives_back_draws,
    )


def cut_graph(
    module: GraphModule, place_of: Mapping[Node, int], example_of: Callable[[Node, int], Any]
) -> list[Piece]:
    """The pieces of a graph in order.

    Args:
        place_of: the piece of each node that calls something. The nodes of a piece need no later one's results.
        example_of: what an input of the piece at a place looks like.

    Raises:
        Unsupported: something that is neither a tensor nor a number passes from one piece to another.
    """
    (output,) = module.graph.find_nodes(op="output")
    results = set(output.args[0])
    places = sorted(set(place_of.values()))
    pieces = [_PieceWriter(module, place_of, place, results, example_of).write() for place in places]
    return _with_forgotten(pieces, {node.name for node in results})


def is_passable(value: Any) -> bool:
    """Whether a value can be passed to a later piece, or made again there; items of sequences of tensors are passed
    apart."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided
    if isinstance(value, tuple):
        return all(not isinstance(item, torch.Tensor) and is_passable(item) for item in value)
    return type(value) is int or (isinstance(value, torch.SymInt) and has_backed_symbols(value))


def is_sequence_of_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value)


def _with_forgotten(pieces: Sequence[Piece], results: set[str]) -> list[Piece]:
    needed = set(results)
    found: list[Piece] = []
    for piece in reversed(pieces):
        names = dict.fromkeys(name for name in (*piece.inputs, *piece.outputs) if isinstance(name, str))
        found.append(replace(piece, forgotten=tuple(name for name in names if name not in needed)))
        needed.update(names)
    return found[::-1]


class _PieceWriter:
    """Writes the graph of one piece; see ``cut_graph``."""

    def __init__(
        self,
        module: GraphModule,
        place_of: Mapping[Node, int],
        place: int,
        results: set[Node],
        example_of: Callable[[Node, int], Any],
    ) -> None:
        self._module = module
        self._place_of = place_of
        self._place = place
        self._results = results
        self._example_of = example_of
        self._graph = Graph()
        self._copies: dict[Node, Any] = {}
        self._symbols: dict[sympy.Symbol, Node] = {}
        self._inputs: list[str | NumberSource] = []

    def write(self) -> Piece:
        own = [node for node in self._module.graph.nodes if self._place_of.get(node) == self._place]
        sources = dict.fromkeys(source for node in own for source in node.all_input_nodes)
        foreign = [source for source in sources if self._place_of.get(source, -1) != self._place]
        passed = [node for node in foreign if node.op != "get_attr" and self._is_passed(node)]
        for node in passed:
            self._take(node.name, self._example(node), node)
        self._take_symbols([self._example(node) for node in passed], foreign)
        entered = self._entered_before(own)
        for node in (*entered, *foreign):
            if node not in self._copies:
                self._copies[node] = self._made_again(node)
        for node in own:
            self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
            if node.target is enter_autocast:
                entered.append(node)
            elif node.target is exit_autocast:
                entered.remove(node.args[0])  # type: ignore[arg-type]
        for node in reversed(entered):
            left = self._graph.call_function(exit_autocast, (self._copies[node],))
            left.meta["example_value"] = None
        outputs = [node for node in own if self._is_output(node)]
        self._graph.output(tuple(self._copies[node] for node in outputs))
        module = lazy_module(self._module, self._graph)
        return Piece(module, tuple(self._inputs), tuple(node.name for node in outputs))

    def _example(self, node: Node) -> Any:
        return self._example_of(node, self._place)

    def _is_passed(self, node: Node) -> bool:
        return node.op == "placeholder" or isinstance(node.meta["example_value"], torch.Tensor)

    def _is_output(self, node: Node) -> bool:
        if not isinstance(node.meta["example_value"], torch.Tensor):
            return False
        return node in self._results or any(
            self._place_of.get(user, self._place) != self._place for user in node.users
        )

    def _take(self, given: str | NumberSource, example: Any, node: Node | None = None) -> Node:
        placeholder = self._graph.placeholder(given if isinstance(given, str) else "size")
        placeholder.meta["example_value"] = example
        self._inputs.append(given)
        if node is not None:
            self._copies[node] = placeholder
        return placeholder

    def _take_symbols(self, taken: Sequence[Any], foreign: Sequence[Node]) -> None:
        """Makes an input of each symbol that the piece needs and that no other input of it determines."""
        determined = symbol_places(taken)
        for symbol, place in determined.items():
            if place.read == "number":
                self._symbols[symbol] = list(self._graph.nodes)[place.position]
        needed: set[sympy.Symbol] = set()
        for example in taken:
            needed |= _symbols_of(example) - determined.keys()
        for node in foreign:
            if not self._is_passed(node):
                needed |= _symbols_of(node.meta["example_value"]) - self._symbols.keys()
        if not needed:
            return
        placeholders = self._module.graph.find_nodes(op="placeholder")
        whole = [node.meta["example_value"] for node in placeholders]
        for symbol, place in symbol_places(whole).items():
            if symbol in needed and symbol not in self._symbols:
                self._symbols[symbol] = self._take(place, place.value(whole))

    def _entered_before(self, own: Sequence[Node]) -> list[Node]:
        """The autocast regions that the piece begins in."""
        entered: list[Node] = []
        for node in self._module.graph.nodes:
            if node is own[0]:
                break
            if node.target is enter_autocast:
                entered.append(node)
            elif node.target is exit_autocast:
                entered.remove(node.args[0])  # type: ignore[arg-type]
        return entered

    def _made_again(self, node: Node) -> Any:
        if node.op == "get_attr" or node.target is enter_autocast:
            return self._graph.node_copy(node, self._copies.__getitem__)
        value = node.meta["example_value"]
        if not is_passable(value):
            raise Unsupported("cut", f"{node} passes from one piece of a program to another")
        return self._number(value)

    def _number(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._number, value))
        if not isinstance(value, torch.SymInt):
            return value
        return number_node(expression_of(value), self._symbols, self._operation)

    def _operation(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Node:
        node = self._graph.call_function(function, operands)
        values = (given.meta["example_value"] if isinstance(given, Node) else given for given in operands)
        node.meta["example_value"] = function(*values)
        return node


def _symbols_of(value: Any) -> set[sympy.Symbol]:
    if isinstance(value, torch.Tensor):
        numbers: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
    else:
        numbers = value if isinstance(value, tuple) else (value,)
    found: set[sympy.Symbol] = set()
    for number in numbers:
        if isinstance(number, torch.SymInt):
            found |= expression_of(number).free_symbols  # type: ignore[arg-type]
    return found
