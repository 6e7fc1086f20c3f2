"""The sizes that a traced graph returns beside its results, for whoever makes views of these or checks gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from gradsplit.compile_core.ir.graphs import OpenSize, ResultAlias
from gradsplit.compile_core.ir.numbers import expression_of
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


class OpenSizes:
    """Collects them, each once.

    Attributes:
        numbers: what the graph returns, in order.
    """

    def __init__(self) -> None:
        self.numbers: list[torch.SymInt] = []
        self._positions: dict[sympy.Expr, int] = {}

    def collect(self, results: Sequence[int | ResultAlias], specs: Sequence[TensorSpec]) -> None:
        """Take in all sizes of aliases and of tangents, which may be SymInts."""
        for result in results:
            if not isinstance(result, int) and result.view is not None:
                size, stride, offset = result.view
                self._add((*size, *stride, offset))
        for spec in specs:
            self._add((*spec.shape, *spec.stride))

    def of_results(self, results: Sequence[int | ResultAlias]) -> tuple[int | ResultAlias, ...]:
        """The results with integers and ``OpenSize`` for their sizes."""
        return tuple(map(self._result, results))

    def of_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The specs with integers and ``OpenSize`` for their sizes."""
        return tuple(
            replace(spec, shape=self._shown(spec.shape), stride=self._shown(spec.stride)) for spec in specs
        )

    def _result(self, result: int | ResultAlias) -> int | ResultAlias:
        if isinstance(result, int) or result.view is None:
            return result
        size, stride, offset = result.view
        return replace(result, view=(self._shown(size), self._shown(stride), *self._shown([offset])))

    def _add(self, numbers: Iterable[Any]) -> None:
        for number in numbers:
            if isinstance(number, torch.SymInt):
                expression = expression_of(number)
                if not expression.is_number and expression not in self._positions:
                    self._positions[expression] = len(self.numbers)
                    self.numbers.append(number)

    def _shown(self, numbers: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self._size(number) for number in numbers)

    def _size(self, number: Any) -> Any:
        if not isinstance(number, torch.SymInt):
            return number
        expression = expression_of(number)
        return int(expression) if expression.is_number else OpenSize(self._positions[expression])
