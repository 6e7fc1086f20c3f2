"""Backends for tests of programs: they count what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.backends.registry import GraphCompiler, resolve_backend
from gradsplit.compile_core.interface.graph_compiler import compile_any_graph
from gradsplit.compile_core.options import CompileOptions


class CompileCounter:
    """A backend that runs graphs with torch's own kernels.

    Attributes:
        frame_count: graphs compiled.
        op_count: calls in all of them.
    """

    def __init__(self) -> None:
        self.clear()

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        self.frame_count += 1
        self.op_count += sum(node.op.startswith("call") for node in gm.graph.nodes)
        return gm.forward

    def clear(self) -> None:
        """Counts from zero again."""
        self.frame_count = 0
        self.op_count = 0


class CompileCounterWithBackend(CompileCounter):
    """A counter that hands the graphs on to another backend.

    Attributes:
        graphs: the graphs in order.
    """

    def __init__(self, backend: str | GraphCompiler) -> None:
        self.backend = backend
        super().__init__()

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        super().__call__(gm, example_inputs)
        self.graphs.append(gm)
        return compile_any_graph(gm, example_inputs, resolve_backend(self.backend), CompileOptions())

    def clear(self) -> None:
        super().clear()
        self.graphs: list[torch.fx.GraphModule] = []
