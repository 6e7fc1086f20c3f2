"""Gradients of parameters that got hooks after the forward, whose programs were to store them past the engine.

What programs compute for such a parameter in a backward is added up, and the engine is given the sum to accumulate, as
a backward of its own: all hooks run, in the engine's order, and see what they would see in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.gradients.accumulation_nodes import hooks_came_late
from gradsplit.distributed.gradients.contributions import Contributions


class LateHooks:
    """Of one round.

    Args:
        parameters: by name.
        factor: by which programs multiply what they store.
        names: of those with hooks to which programs contribute; an attribute, too.
        by_engine: of those to which autograd's engine does.

    Raises:
        CompileError: both contribute to a parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        factor: float,
        names: frozenset[str],
        by_engine: Collection[str],
    ) -> None:
        if both := sorted(names.intersection(by_engine)):
            raise CompileError(hooks_came_late(", ".join(both)))
        self._parameters = parameters
        self._factor = factor
        self.names = names
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, contribution: torch.Tensor) -> None:
        """A program has computed this."""
        before = self._sums.get(name)
        self._sums[name] = contribution if before is None else before + contribution

    def take(self, names: Sequence[str], contributions: Contributions) -> list[str]:
        """A program has contributed to these. Those whose gradient need not go through the engine; the others do when
        they are whole, and come back from there as the last contribution."""
        left = []
        for name in names:
            if name not in self.names:
                left.append(name)
            elif contributions.left(name) > 1:
                contributions.nothing_comes((name,))
            elif (total := self._sums.pop(name, None)) is None:
                left.append(name)
            else:
                parameter = self._parameters[name]
                torch.autograd.backward(parameter, total.to(parameter.dtype) / self._factor)
        return left
