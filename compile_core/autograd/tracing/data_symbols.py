"""The sizes that depend on data, over several runs of a captured graph on fake tensors.

Each run gives them new symbols, so that what one run assumes is assumed, and written down as a check, by the next one
too. When all is assumed that the program does, the symbols of the first run are made those of the last, since what was
found out in the first run speaks of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.ir.numbers import is_sized_by_data
from gradsplit.compile_core.torch_facts.symbolic_numbers import data_symbols, one_symbol


def has_data_sizes(module: GraphModule) -> bool:
    """Whether a captured graph has sizes or integers that depend on data."""
    return any(_depends_on_data(node) for node in module.graph.nodes)


def _depends_on_data(node: Node) -> bool:
    return is_sized_by_data(node.meta.get("example_value"))


class DataSymbols:
    """Notes the symbols that each node of a graph gives, run by run."""

    def __init__(self) -> None:
        self._found: dict[str, list[list[Any]]] = {}

    def keep(self, module: GraphModule) -> GraphModule:
        """The graph with its nodes' symbols noted as they run; ``module`` stays as it is."""
        if not has_data_sizes(module):
            return module
        kept = copy_module(module)
        for node in kept.graph.nodes:
            if node.op in ("call_function", "call_method") and _depends_on_data(node):
                node.target = self._noted(node.name, node.op, node.target)
                node.op = "call_function"
        kept.recompile()
        return kept

    def _noted(self, name: str, op: str, target: Any) -> Callable[..., Any]:
        def noted_call(*args: Any, **kwargs: Any) -> Any:
            run = getattr(args[0], target) if op == "call_method" else target
            result = run(*(args[1:] if op == "call_method" else args), **kwargs)
            symbols = [symbol for part in tree_leaves(result) for symbol in data_symbols(part)]
            self._found.setdefault(name, []).append(symbols)
            return result

        return noted_call

    def settle(self, env: Any) -> None:
        """Makes the symbols of the first run those of the last."""
        for runs in self._found.values():
            for first, last in zip(runs[0], runs[-1], strict=True):
                if first != last:
                    one_symbol(env, first, last)
