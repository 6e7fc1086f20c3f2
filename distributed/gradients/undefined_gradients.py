"""Gradients that did not come to a program's results, and what follows for parameters that depend on no others.

Where a function behind the module returns no gradient, the engine goes on with an undefined one: the hooks of stock
DDP's reducer run as ever, and it takes zeros. Where nothing leads to a result in the backward that runs, they do not
run, and the parameters are missing. The engine shows a node no difference between the two; autograd's graph does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gradsplit.distributed.gradients.paths_of_backward import reached_results


@dataclass(frozen=True)
class UndefinedGradients:
    """Of what one program stores.

    Attributes:
        missing: nothing will come.
        zeros: count as zeros.
    """

    missing: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()

    def include(self, name: str) -> bool:
        return name in self.missing or name in self.zeros

    def with_missing(self, names: frozenset[str]) -> UndefinedGradients:
        """The same, but that nothing will come to these either."""
        return UndefinedGradients(self.missing | names, self.zeros - names) if names else self

    @staticmethod
    def of_program(node: Any, results_of: Mapping[str, Collection[int]]) -> UndefinedGradients:
        """
        Args:
            node: of a program which the engine runs now, to be asked where all gradients are accumulated.
            results_of: for each gradient that is undefined, the results of the node that it depends on.
        """
        if not results_of:
            return UndefinedGradients()
        reached = reached_results(node)
        zeros = frozenset(name for name, results in results_of.items() if not reached.isdisjoint(results))
        return UndefinedGradients(frozenset(results_of) - zeros, zeros)
