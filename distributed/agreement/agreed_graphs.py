"""Which graphs the ranks of a module have agreed on: one that is new in structure is compiled by all of them together.

A rank may compile alone what differs only in sizes from a graph that was agreed on, as stock DDP serves a rank with
another batch size: the buckets that its backward fills are the same. Nor need the others have a graph that fills none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distributed.agreement.agreement import Agreement, Statement
from distributed.agreement.graph_fingerprint import GraphFingerprint, first_difference

Compiled = TypeVar("Compiled")


class AgreedGraphs:
    """The graphs of one module.

    Args:
        agreement: of the module's process group.
        timeout_s: how long ranks wait for one another.
    """

    def __init__(self, agreement: Agreement, timeout_s: float) -> None:
        self._agreement = agreement
        self._timeout_s = timeout_s
        self._agreed: dict[str, GraphFingerprint] = {}

    def compile(self, graph: GraphFingerprint, compile: Callable[[], Compiled]) -> Compiled:
        """What ``compile`` makes of a graph, or of one more form of it.

        Raises:
            CompileError: the ranks disagree, or one failed; on every rank.
            BaseException: from ``compile``, which ends the job on the other ranks.
        """
        if graph.digest in self._agreed:
            return self.compile_alone(graph, compile)
        statements = (
            Statement("captured another graph", graph.lines, graph.places),
            Statement("has other dynamic sizes", graph.open_sizes),
        )
        what = f"compiles {_describe(graph)}{self._difference(graph)}"
        compiled = self._agreement.compile_together(what, self._timeout_s, lambda: (compile(), statements))
        self._agreed[graph.digest] = graph
        return compiled

    def compile_alone(self, graph: GraphFingerprint, compile: Callable[[], Compiled]) -> Compiled:
        """What ``compile`` makes of a graph that the other ranks need not have.

        Raises:
            BaseException: from ``compile``, which ends the job on the other ranks.
        """
        what = "another size or form of" if graph.digest in self._agreed else "for itself"
        return self._agreement.compile_alone(f"compiles {what} {_describe(graph)}", self._timeout_s, compile)

    def _difference(self, graph: GraphFingerprint) -> str:
        """Where a graph first differs from the one that it has most in common with."""
        first = [
            position
            for known in self._agreed.values()
            if (position := first_difference(known.lines, graph.lines)) is not None
        ]
        position = max(first, default=len(graph.lines))
        if position >= len(graph.lines):
            return ""
        return f", which no graph before had: {graph.lines[position].strip()!r} {graph.places[position]}".rstrip()


def _describe(graph: GraphFingerprint) -> str:
    place = next((place for place in graph.places if place), "")
    return f"a graph of {len(graph.lines)} lines" + (f" that begins at {place}" if place else "")
