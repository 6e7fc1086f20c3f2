"""Compiled programs whose backward may still run, and which gradients each will store."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradsplit.distributed.gradients.running_backward import current_node, will_run

_MANY = 16


class AnnouncedPrograms:
    """Nodes of autograd's graph, as long as that lives."""

    def __init__(self) -> None:
        self._nodes: list[tuple[weakref.ref[Any], Sequence[str]]] = []

    def add(self, node: Any, names: Sequence[str]) -> None:
        """When the engine runs the node, these gradients are stored."""
        if len(self._nodes) >= _MANY:
            self._nodes = [entry for entry in self._nodes if entry[0]() is not None]
        self._nodes.append((weakref.ref(node), names))

    def contributions(self) -> Counter[str]:
        """How many will be stored to each gradient in the backward that runs."""
        found: Counter[str] = Counter()
        current = current_node()
        for reference, names in self._nodes:
            node = reference()
            if node is not None and (node is current or will_run(node)):
                found.update(names)
        return found
