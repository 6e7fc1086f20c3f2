"""Runs something else in the place of certain calls of a captured graph: what a trace does about them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from gradsplit.compile_core.ir.control_flow import DATA_DEPENDENT


def replace_calls(module: GraphModule, replacements: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """A copy of ``module`` whose calls have other targets, also in the bodies that it holds.

    The bodies of control flow that data decide stay as they are: they are traced apart.
    """
    if not any(_is_replaced(node, replacements) for inner in _graphs(module) for node in inner.graph.nodes):
        return module
    replaced = copy_module(module)
    for node in replaced.graph.nodes:
        if _is_replaced(node, replacements):
            node.target = replacements[node.target]
    for name, body in traced_bodies(module):
        setattr(replaced, name, replace_calls(body, replacements))
    replaced.recompile()
    return replaced


def traced_bodies(module: GraphModule) -> list[tuple[str, GraphModule]]:
    """The bodies, by name, that are traced as part of the graph itself: not those of control flow that data decide."""
    return [
        (str(node.target), getattr(module, str(node.target)))
        for node in module.graph.nodes
        if _is_body(module, node)
    ]


def copy_module(module: GraphModule) -> GraphModule:
    """A module of the same parts with a graph of its own."""
    copied = copy.copy(module)
    copied.graph = copy.deepcopy(module.graph)
    return copied


def _graphs(module: GraphModule) -> list[GraphModule]:
    return [inner for inner in module.modules() if isinstance(inner, GraphModule)]


def _is_replaced(node: Node, replacements: Mapping[Any, Callable[..., Any]]) -> bool:
    return node.op == "call_function" and node.target in replacements


def _is_body(module: GraphModule, node: Node) -> bool:
    return (
        node.op == "get_attr"
        and isinstance(getattr(module, str(node.target), None), GraphModule)
        and all(user.target not in DATA_DEPENDENT for user in node.users)
    )
