"""Stage between trace and partition: random numbers as functions of seeds that the program draws.

Every draw of uniform or normal numbers or of integers becomes an operator of ``ir.counter_random``; its seed is one
of a small tensor of seeds, which the program draws from torch's generator when it runs. So ``torch.manual_seed`` makes
runs reproducible, the numbers are made inside whichever kernel needs them, and the backward makes them again instead of
keeping them: the seeds are what is saved.

What only the backward draws has seeds that the backward draws, so that a second run of it sees other numbers, as in
eager. Operators without such a form (``randperm``, ``multinomial``, attention with dropout, those with a generator of
their own) stay torch's kernels and draw in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import is_of_backward, mark_as_backward
from gradsplit.compile_core.ir.counter_random import (
    INTEGERS,
    NORMAL,
    SEED_STRIDE,
    UNIFORM,
    UNIFORM_BITS,
    integers_in_range,
)
from gradsplit.compile_core.ir.graphs import JointGraph

aten = torch.ops.aten

_DEVICES = ("cpu", "cuda")


def random_to_counters(joint: JointGraph) -> JointGraph:
    """The joint graph with seeds; changes its module and returns it."""
    graph = joint.module.graph
    draws: dict[tuple[torch.device, bool], list[Node]] = {}
    for node in graph.nodes:
        if _counter_form(node) is not None:
            draws.setdefault((node.meta["val"].device, is_of_backward(node)), []).append(node)
    for (_, of_backward), nodes in draws.items():
        seeds = _draw_seeds(graph, nodes, of_backward)
        for slot, node in enumerate(nodes):
            _replace(graph, node, seeds, slot)
    graph.lint()
    joint.module.recompile()
    return joint


def _counter_form(node: Node) -> tuple[Any, tuple[Any, ...], Sequence[Any]] | None:
    """The operator that can take a node's place, its range where it has one, and the size of its result."""
    if node.op != "call_function" or node.target not in (
        aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low,
    ):  # fmt: skip
        return None
    result = node.meta["val"]
    is_plain = result.layout == torch.strided and not node.kwargs.get("pin_memory")
    if result.device.type not in _DEVICES or not is_plain:
        return None
    args: Any = node.args
    if node.target in (aten.rand.default, aten.randn.default):
        operator = UNIFORM if node.target is aten.rand.default else NORMAL
        return (operator, (), args[0]) if result.dtype in UNIFORM_BITS else None
    low, high, size = args if node.target is aten.randint.low else (0, *args)
    in_range = isinstance(low, int) and isinstance(high, int) and integers_in_range(low, high)
    return (INTEGERS, (low, high), size) if in_range and not result.dtype.is_complex else None


def _draw_seeds(graph: Graph, nodes: Sequence[Node], of_backward: bool) -> Node:
    """The program's seeds for some draws: first of all, or first in the backward."""
    example = nodes[0].meta["val"]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(nodes[0] if of_backward else first):
        seeds = graph.create_node(
            "call_function",
            aten.randint.low,
            (-(2**63), 2**63 - 1, [len(nodes), SEED_STRIDE]),
            {"dtype": torch.int64, "device": example.device, "pin_memory": False},
            "seeds",
        )
    with example.fake_mode:
        seeds.meta["val"] = torch.empty(len(nodes), SEED_STRIDE, dtype=torch.int64, device=example.device)
    if of_backward:
        mark_as_backward(seeds)
    return seeds


def _replace(graph: Graph, node: Node, seeds: Node, slot: int) -> None:
    form = _counter_form(node)
    assert form is not None
    operator, limits, size = form
    with graph.inserting_before(node):
        counter = graph.create_node(
            "call_function",
            operator,
            (seeds, slot, size, *limits),
            {"dtype": node.meta["val"].dtype},
            operator.overloadpacket.__name__,
        )
    counter.meta = dict(node.meta)
    node.replace_all_uses_with(counter)
    graph.erase_node(node)
