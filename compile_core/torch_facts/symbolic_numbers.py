"""Torch's symbolic sizes beneath ``torch.fx.experimental.symbolic_shapes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.private_parts import private

_PURPOSE = "sizes that differ between calls"

SourceLocation = private("torch._guards:SLoc", _PURPOSE)
Source = private("torch._guards:Source", _PURPOSE)
integer_infinity = private("torch.utils._sympy.numbers:int_oo", _PURPOSE)
ValueRanges = private("torch.utils._sympy.value_ranges:ValueRanges", _PURPOSE)
PythonPrinter = private("torch.utils._sympy.printers:PythonPrinter", _PURPOSE)
interpret_expression = private("torch.utils._sympy.interp:sympy_interp", _PURPOSE)


def value_at_compilation(number: Any) -> Any:
    """An integer as it is at the call that is compiled for: to weigh by, at the price of no condition."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def memory_order(strides: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The dims as they lie in memory, outermost first, and the permutation back from that order."""
    order = sorted(range(len(strides)), key=lambda dim: -value_at_compilation(strides[dim]))
    return order, [order.index(dim) for dim in range(len(order))]
