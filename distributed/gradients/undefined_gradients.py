"""Gradients that did not come to a program's results, and what follows for parameters that depend on no others.

Where a function behind the module returns no gradient, the engine goes on with an undefined one: the hooks of stock
DDP's reducer run as ever, and it takes zeros. Where nothing leads to a result in the backward that runs, they do not
run, and the parameters are missing. The engine shows a node no difference between the two; autograd's graph does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

# torch exports it without declaring it.
_will_run: Any = torch._C._will_engine_execute_node  # type: ignore[attr-defined]

Roots = Sequence[torch.Tensor | GradientEdge]
# Of the backwards that run, by their start.
_roots: dict[object, Roots] = {}


@contextmanager
def paths_begin_at(roots: Roots) -> Iterator[None]:
    """A backward runs from here."""
    start = object()
    _roots[start] = roots
    try:
        yield
    finally:
        del _roots[start]


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
        reached = _reached_results(node)
        zeros = frozenset(name for name, results in results_of.items() if not reached.isdisjoint(results))
        return UndefinedGradients(frozenset(results_of) - zeros, zeros)


def _reached_results(node: Any) -> set[int]:
    """The results of ``node`` to which the backward that runs has a path."""
    roots = [root for roots in [*_roots.values()] for root in roots]
    edges = [
        (root.node, root.output_nr) if isinstance(root, GradientEdge) else (root.grad_fn, root.output_nr)
        for root in roots
    ]
    reached = {position for to, position in edges if to is node}
    # Of where a backward begins, the engine does not tell whether it runs it.
    pending = [to for to, _ in edges if to is not None]
    seen: set[Any] = set()
    while pending:
        for to, position in pending.pop().next_functions:
            if to is node:
                reached.add(position)
            elif to is not None and to not in seen and _will_run(to):
                seen.add(to)
                pending.append(to)
    return reached
