"""Graph modules whose Python text is made when they are called, if ever.

Most graphs of a compilation are read by the next stage and never run; their text costs more than a third of a trace.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from gradsplit.compile_core.torch_facts.private_parts import private

_PURPOSE = "compile times: texts of graphs that never run are not made"
_NOT_LAZY = "compiling takes longer"
_use_lazy_graph_module = private(
    "torch.fx._lazy_graph_module:_use_lazy_graph_module", _PURPOSE, _NOT_LAZY, contextlib.nullcontext
)
_make_graph_module = private(
    "torch.fx._lazy_graph_module:_make_graph_module", _PURPOSE, _NOT_LAZY, GraphModule
)


def lazy_module(
    root: torch.nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule"
) -> GraphModule:
    """As ``GraphModule(root, graph, name)``; ``recompile`` costs nothing."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)
