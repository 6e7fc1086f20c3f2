"""What the nodes of a captured graph hold, which its passes ask for, where it did not come from a capture.

A graph that was loaded from a folder, cut out of another or written by hand has calls and inputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points


def note_fake_values(module: GraphModule, examples: Sequence[Any]) -> None:
    """Gives ``meta["example_value"]`` to each node of ``module`` that has none.

    Args:
        examples: a fake tensor or a number for each placeholder.

    Raises:
        Unsupported: the graph does not run on fake tensors.
    """
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    if all("example_value" in node.meta for node in nodes):
        return
    values = find_cut_points(module, examples).values
    for node in nodes:
        node.meta.setdefault("example_value", values[node])
