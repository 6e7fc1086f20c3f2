"""Which node of the captured graph each operator of its trace comes from: for people who look for their line.

In the forward it is the node that runs. In the backward it is the one that ran when autograd made the node that runs
now: autograd numbers its nodes in the order in which a thread makes them.
"""

from __future__ import annotations

import bisect
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors, marked_as_own_backward
from gradsplit.compile_core.autograd.tracing.kept_layouts import kept_layouts
from gradsplit.compile_core.torch_facts.autograd_engine import (
    current_autograd_node,
    number_of_node,
    numbers_given,
)
from gradsplit.compile_core.torch_facts.dispatcher import KEPT
from gradsplit.compile_core.torch_facts.refusals import may_refuse

# Where a traced node's ``meta`` has the name of the captured node.
CAPTURED = "captured"
# In the ``meta`` of a captured node: the program reads nothing of what it gives.
UNREAD = "unread"


def note_unread(module: GraphModule) -> None:
    """Notes in a captured graph what the program has called and does not read, what changes something in place among
    it: plain PyTorch runs it, and may raise."""
    read = ancestors(module.graph.output_node().all_input_nodes)
    for node in module.graph.nodes:
        if node.op.startswith("call") and node not in read:
            node.meta[UNREAD] = True


class CapturedNodes:
    """Runs a captured graph and knows, while operators are recorded, which node they are of."""

    def __init__(self) -> None:
        self._nodes: list[Node | None] = [None]
        self._first_numbers = [-1]

    def run(self, module: GraphModule, *inputs: Any) -> Any:
        """As ``module.forward(*inputs)``."""
        values: dict[Any, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            if node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            self._nodes.append(node)
            self._first_numbers.append(numbers_given())
            if node.target is torch.autograd.grad:
                with marked_as_own_backward(len(self._nodes)):
                    values[node] = torch.autograd.grad(*args, **kwargs)
                continue
            with kept_layouts(map(values.get, node.all_input_nodes)):
                if node.op == "call_function":
                    values[node] = node.target(*args, **kwargs)
                elif node.op == "call_method":
                    values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
                else:
                    values[node] = module.get_submodule(node.target)(*args, **kwargs)
        raise AssertionError("a graph ends with its output")

    def mark(self, node: Node) -> None:
        """Notes in a recorded node which one it is of, and its user's lines."""
        running = current_autograd_node()
        place = (
            -1 if running is None else bisect.bisect_right(self._first_numbers, number_of_node(running)) - 1
        )
        captured = self._nodes[place]
        if captured is not None:
            node.meta[CAPTURED] = captured.name
            node.meta["stack_trace"] = captured.meta.get("stack_trace", "")
            if running is None and UNREAD in captured.meta and may_refuse(node):
                node.meta[KEPT] = True
