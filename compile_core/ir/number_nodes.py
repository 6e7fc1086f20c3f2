"""Nodes that compute a symbolic integer from the sizes of the graph's inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from gradsplit.compile_core.torch_facts.symbolic_numbers import interpret_expression

MakeNode = Callable[[Callable[..., Any], tuple[Any, ...]], Any]

# How torch's interpreter of expressions calls the operations, and what a node calls for them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "python_mod": operator.mod,
    "pow_by_natural": operator.pow,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
    "int_truediv": operator.truediv,
    "truediv": operator.truediv,
    "sqrt": torch.sym_sqrt,
    "abs": operator.abs,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and_": operator.and_,
    "or_": operator.or_,
    "not_": torch.sym_not,
}
_ROUNDINGS: dict[str, Callable[..., Any]] = {
    "floor_to_int": math.floor,
    "ceil_to_int": math.ceil,
    "trunc_to_int": math.trunc,
    "round_to_int": round,
}


class _Nodes:
    """What torch's interpreter of expressions asks for each operation."""

    def __init__(self, make_node: MakeNode) -> None:
        self._make_node = make_node

    def constant(self, value: Any, dtype: torch.dtype) -> int | float:
        return int(value) if dtype is torch.int64 else float(value)

    def to_dtype(self, value: Any, dtype: torch.dtype) -> Any:
        return self._make(torch.sym_float, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _ROUNDINGS:
            return lambda value, dtype: self._make(_ROUNDINGS[name], value)
        if name in _FUNCTIONS:
            return lambda *operands: self._make(_FUNCTIONS[name], *operands)
        raise AttributeError(name)

    def _make(self, function: Callable[..., Any], *operands: Any) -> Any:
        if not any(isinstance(operand, fx.Node) for operand in operands):
            return function(*operands)
        return self._make_node(function, operands)


def number_node(
    expression: sympy.Basic, leaves: dict[sympy.Symbol, fx.Node], make_node: MakeNode
) -> fx.Node | int | float:
    """The node of an expression over ``leaves``.

    Raises:
        NotImplementedError: an operation has no node.
    """
    try:
        return interpret_expression(_Nodes(make_node), leaves, expression)
    except (AttributeError, KeyError) as error:
        raise NotImplementedError(str(expression)) from error
