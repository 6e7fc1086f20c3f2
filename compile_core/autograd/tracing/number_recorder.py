"""The numbers of a graph that is being recorded: what computes each of them.

A size is an expression over the symbols of a ShapeEnv. Whichever tensor the program took it from, here it is computed
from the sizes of the graph's inputs: so no intermediate tensor is kept for its size, and no size of the forward comes
from a tangent. An expression that has come to be one value is a literal.

Floats keep the program's operations in their order, since algebra rounds otherwise: ``keep_operations`` notes them
where the captured graph computes with numbers. Numbers out of a tensor's data are results of operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.number_nodes import number_node
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS, symbol_places, symbols_of
from gradsplit.compile_core.torch_facts.symbolic_numbers import (
    OF_SYMBOLIC_FLOATS,
    depends_on_data,
    symbols_read_off,
)

aten = torch.ops.aten


class NumberOperations:
    """Which operation of the program made a number, by the identity of the number's SymNode."""

    def __init__(self) -> None:
        # The numbers are held, so that no other one takes the identity of one that is gone.
        self._found: dict[int, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {}
        self._whole: dict[sympy.Symbol, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {}

    def keep(self, module: GraphModule) -> GraphModule:
        """The captured graph with its operations on numbers noted as they run; ``module`` stays as it is."""
        nodes = [node for node in module.graph.nodes if node.op == "call_function" and _computes_number(node)]
        if not nodes:
            return module
        kept = copy_module(module)
        for node in kept.graph.nodes:
            if node.op == "call_function" and _computes_number(node):
                node.target = self._noted(node.target)
        kept.recompile()
        return kept

    def _noted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        function = torch.sym_float if operation is float else operation
        traced = OF_SYMBOLIC_FLOATS.get(function, function)

        def noted_operation(*operands: Any) -> Any:
            if function is math.trunc and isinstance(operands[0], torch.SymFloat):
                # Sizes may be made of it: a symbol of its own is easier to reason about.
                result = operands[0].node.shape_env.create_unbacked_symint()
                self._whole[result.node.expr] = (result, function, operands)
                return result
            result = traced(*operands)
            if isinstance(result, torch.SymFloat):
                self._found[id(result.node)] = (result, function, operands)
            return result

        return noted_operation

    def whole_number(self, symbol: sympy.Symbol) -> tuple[Any, Callable[..., Any], tuple[Any, ...]] | None:
        """What made an integer of a float, by the integer's symbol: the integer, the function and its operands."""
        return self._whole.get(symbol)

    def of(self, number: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        found = self._found.get(id(number.node))
        return None if found is None else found[1:]


def reads_numbers(module: GraphModule) -> bool:
    """Whether a captured graph reads a number out of a tensor's data."""
    return any(node.op == "call_method" and node.target == "item" for node in module.graph.nodes)


def _computes_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, float, *SYMBOLIC_NUMBERS))


class NumberRecorder:
    """Nodes for numbers, made when an operator takes them; see the module."""

    def __init__(self, graph: Graph, operations: NumberOperations) -> None:
        self._graph = graph
        self._operations = operations
        self._inputs: list[Any] = []
        self._placeholders: list[Node] = []
        # By symbol: the first result that has it, and where.
        self._read_off: dict[sympy.Symbol, tuple[Node, str, int]] = {}
        self._of_number: dict[int, tuple[Any, Node]] = {}
        self._of_expression: dict[sympy.Expr, Node | int | float] = {}

    def add_input(self, value: Any, placeholder: Node) -> None:
        """An input of the graph, a tensor or a number, in their order."""
        self._inputs.append(value)
        self._placeholders.append(placeholder)
        if isinstance(value, SYMBOLIC_NUMBERS):
            self.add_result(value, placeholder)

    def add_result(self, number: Any, node: Node) -> None:
        """A number that an operator gives."""
        self._of_number[id(number.node)] = (number, node)
        if isinstance(number.node.expr, sympy.Symbol):
            self._of_expression.setdefault(number.node.expr, node)
        self.note(number, node)

    def note(self, result: Any, node: Node) -> None:
        """Take in the symbols of what an operator gives: the first that has one has made it, if it depends on data."""
        for symbol, read, dim, _ in symbols_read_off(result):
            self._read_off.setdefault(symbol, (node, read, dim))

    def condition(self, expression: Any) -> Any:
        """The node of a condition over symbols as they were made, whatever has become known of them.

        Raises:
            Unsupported: nothing in the graph determines a symbol.
        """
        return self._of_symbols(expression)

    @functools.cached_property
    def _places(self) -> Any:
        return symbol_places(self._inputs)

    def argument(self, number: Any) -> Node | int | float:
        """What an operator takes for a number.

        Raises:
            Unsupported: nothing in the graph determines the number.
        """
        known = self._of_number.get(id(number.node))
        if known is not None:
            return known[1]
        made = self._operations.of(number)
        if made is None:
            return self._of(number)
        function, operands = made
        arguments = map_aggregate(operands, self._operand)
        assert isinstance(arguments, tuple)
        node = self._call(function, arguments, number)
        self._of_number[id(number.node)] = (number, node)
        return node

    def _operand(self, value: Any) -> Any:
        return self.argument(value) if isinstance(value, SYMBOLIC_NUMBERS) else value

    def _of(self, number: Any) -> Node | int | float:
        expression = number.node.expr
        if expression.is_number:
            return int(expression) if isinstance(number, torch.SymInt) else float(expression)
        return self._of_symbols(expression)

    def _of_symbols(self, expression: sympy.Expr) -> Node | int | float:
        found = self._of_expression.get(expression)
        if found is None:
            try:
                symbols = sorted(symbols_of(expression), key=str)
                leaves = {symbol: self._leaf(symbol) for symbol in symbols}
                found = number_node(expression, leaves, self._compute)
            except NotImplementedError as error:
                raise Unsupported(
                    "open-number", f"nothing in the graph computes the number {expression}"
                ) from error
            self._of_expression[expression] = found
        return found

    def _leaf(self, symbol: sympy.Symbol) -> Node:
        found = self._of_expression.get(symbol)
        if found is None:
            place = None if depends_on_data(symbol) else self._places.get(symbol)
            made = self._operations.whole_number(symbol)
            if made is not None:
                number, function, operands = made
                found = self._call(function, tuple(map(self._operand, operands)), number)
            elif place is not None:
                read = aten.sym_size.int if place.read == "size" else aten.sym_stride.int
                found = self._compute(read, (self._placeholders[place.position], place.dim))
            elif symbol in self._read_off:
                found = self._read(*self._read_off[symbol])
            else:
                raise NotImplementedError(f"nothing determines {symbol}")
            self._of_expression[symbol] = found
        assert isinstance(found, Node)
        return found

    def _read(self, node: Node, read: str, dim: int) -> Node:
        if read == "number":
            return node
        if read == "size":
            return self._compute(aten.sym_size.int, (node, dim))
        return self._compute(aten.sym_storage_offset.default, (node,))

    def _compute(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Node:
        return self._call(function, operands, function(*map_arg(operands, lambda read: read.meta["val"])))

    def _call(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> Node:
        node = self._graph.call_function(function, operands)
        node.meta["val"] = value
        return node
