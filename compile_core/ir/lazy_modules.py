"""Graph modules whose Python text is made when they are called, if ever.

Most graphs of a compilation are read by the next stage and never run; their text costs more than a third of a trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module


def lazy_module(
    root: torch.nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule"
) -> GraphModule:
    """As ``GraphModule(root, graph, name)``; ``recompile`` costs nothing."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)
