"""Gradients of parameters that got hooks after the forward, whose programs were to store them past the engine.

What programs compute for such a parameter in a backward is added up, and the engine is given the sum to accumulate, as
a backward of its own: all hooks run, in the engine's order, and see what they would see in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.gradients.accumulation_nodes import hooks_came_late
from gradsplit.distributed.gradients.reduction_round import ReductionRound


class LateHooks:
    """Of one module.

    Args:
        parameters: by name.
        factor: by which programs multiply what they store.

    Attributes:
        names: of the round.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], factor: float) -> None:
        self._parameters = parameters
        self._factor = factor
        self._sums: dict[str, torch.Tensor] = {}
        self.names: frozenset[str] = frozenset()

    def add(self, name: str, contribution: torch.Tensor) -> None:
        before = self._sums.get(name)
        self._sums[name] = contribution if before is None else before + contribution

    def begin(self, names: frozenset[str], by_engine: Collection[str]) -> None:
        """A round begins, in which programs contribute to these, and to some of them autograd's engine, too.

        Raises:
            CompileError: there are such.
        """
        if both := sorted(names.intersection(by_engine)):
            raise CompileError(hooks_came_late(", ".join(both)))
        self.names = names

    def take(self, names: Sequence[str], backward: ReductionRound) -> list[str]:
        """A program has contributed to these. Those whose gradient need not go through the engine; the others do when
        they are whole, and come back from there as the last contribution."""
        left = []
        for name in names:
            if name not in self.names:
                left.append(name)
            elif backward.left(name) > 1:
                backward.nothing_comes((name,))
            elif (total := self._sums.pop(name, None)) is None:
                left.append(name)
            else:
                parameter = self._parameters[name]
                torch.autograd.backward(parameter, total.to(parameter.dtype) / self._factor)
        return left

    def clear(self) -> None:
        self.names = frozenset()
        self._sums.clear()
