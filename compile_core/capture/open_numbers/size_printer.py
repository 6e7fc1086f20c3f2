"""Expressions over symbols as Python text.

Torch's printer is for conditions that may be evaluated on symbolic numbers again; ours run on plain numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from gradsplit.compile_core.torch_facts.symbolic_numbers import PythonPrinter


class SizePrinter(PythonPrinter):
    """Python over the names of symbols; may use ``math``. Raises NotImplementedError for what Python has no name of."""

    def __init__(self, name_of: Callable[[sympy.Symbol], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802  (sympy looks methods up by these names)
        return self._name_of(expr)

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: sympy.Expr) -> str:
        return f"math.sqrt({self._print(expr)})"

    def _print_Rational(self, expr: sympy.Rational) -> str:  # noqa: N802
        raise NotImplementedError(f"the fraction {expr}")

    def _print_Function(self, expr: Any) -> str:  # noqa: N802
        raise NotImplementedError(type(expr).__name__)

    def emptyPrinter(self, expr: Any) -> str:  # noqa: N802
        raise NotImplementedError(type(expr).__name__)
