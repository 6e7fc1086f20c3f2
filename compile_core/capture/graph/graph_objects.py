"""Objects that only the graph knows."""

from __future__ import annotations

from typing import Any

from torch import fx

from gradsplit.compile_core.capture.values.base import CaptureState, Value


class GraphObjectValue(Value):
    """Something else than a tensor that an operation of the graph returned and other operations take."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def python_type(self) -> type:
        return type(self.node.meta["example_value"])

    def describe(self) -> str:
        return f"a {self.python_type().__name__} that the graph computes"

    def graph_argument(self, state: CaptureState) -> Any:
        return self.node
