"""A graph in which the program asks for gradients itself: what its backward reads is kept, or computed again.

Such a graph is one program, forward and backward together. Between what comes before a backward and the rest there is
the same choice as between the two programs of other graphs, and the same cut makes it: what it would not save is
computed a second time, where the backward reads it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from gradsplit.compile_core.autograd.operators.graph_nodes import (
    copy_after_sources,
    descendants,
    own_backward_of,
)
from gradsplit.compile_core.autograd.partitioning.memory_budget import choose_within_budget
from gradsplit.compile_core.autograd.partitioning.min_cut import CutProblem
from gradsplit.compile_core.autograd.partitioning.recompute_orders import find_orders
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.torch_facts.dispatcher import is_needed_unread
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module


def recompute_for_own_backwards(module: GraphModule, activation_memory_budget: float) -> GraphModule:
    """The graph with copies of what is computed again; the graph itself where it has no backward."""
    numbers = {own_backward_of(node) for node in module.graph.nodes} - {None}
    for number in sorted(number for number in numbers if number is not None):
        module = _recompute_for(module, number, activation_memory_budget)
    return module


def _recompute_for(module: GraphModule, number: int, budget: float) -> GraphModule:
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    marked = [node for node in nodes if (own_backward_of(node) or 0) >= number]
    after = descendants(marked)
    before = {node for node in nodes if node not in after}
    primals = [node for node in nodes if node.op == "placeholder"]
    tensors = [node for node in primals if isinstance(node.meta["val"], torch.Tensor)]
    orders = find_orders(module.graph, before, after)
    problem = CutProblem(module.graph, tensors, set(), before, after, [], orders)
    saved = choose_within_budget(problem, budget)
    graph = Graph()
    first = {node: graph.node_copy(node) for node in primals}
    for node in nodes:
        if node in before:
            copy_after_sources(node, graph, first)
    kept = {*saved, *primals, *(node for node in before if is_number(node))}
    second = {node: first[node] for node in kept}
    for node in nodes:
        if node in after:
            copy_after_sources(node, graph, second)
    (output,) = module.graph.find_nodes(op="output")
    copies = {**second, **first}
    graph.output(tuple(None if node is None else copies[node] for node in output.args[0]))
    graph.eliminate_dead_code(is_needed_unread)
    return lazy_module(module, graph)
