"""Runs something else in the place of certain calls of a captured graph: what a trace does about them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from gradsplit.compile_core.ir.control_flow import DATA_DEPENDENT
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module


def replace_calls(module: GraphModule, replacements: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """A copy of ``module`` whose calls have other targets, also in the bodies that it holds.

    The bodies of control flow that data decide stay as they are: they are traced apart.
    """

    def replacement(node: Node) -> Callable[..., Any] | None:
        return replacements.get(node.target) if node.op == "call_function" else None

    return rewrite_with_bodies(module, lambda module: _with_targets(module, replacement))


def replace_each(
    module: GraphModule, replacement: Callable[[Node], Callable[..., Any] | None]
) -> GraphModule:
    """A copy of ``module``, its bodies aside, where each call runs its ``replacement`` if it has one; itself where none
    has."""
    replaced = _with_targets(module, replacement)
    if replaced is not module:
        replaced.recompile()
    return replaced


def _with_targets(
    module: GraphModule, replacement: Callable[[Node], Callable[..., Any] | None]
) -> GraphModule:
    found = [replacement(node) for node in module.graph.nodes]
    if all(target is None for target in found):
        return module
    replaced = copy_module(module)
    for node, target in zip(replaced.graph.nodes, found, strict=True):
        if target is not None:
            node.op, node.target = "call_function", target
    return replaced


def rewrite_with_bodies(module: GraphModule, rewrite: Callable[[GraphModule], GraphModule]) -> GraphModule:
    """``module`` rewritten, and with it the bodies that are traced as part of it; itself where nothing changes.

    Args:
        rewrite: makes a changed copy of a module, its bodies aside, or gives it back as it is.
    """
    rewritten = rewrite(module)
    bodies = {name: (body, rewrite_with_bodies(body, rewrite)) for name, body in traced_bodies(module)}
    changed = {name: after for name, (before, after) in bodies.items() if after is not before}
    if changed and rewritten is module:
        rewritten = copy_module(module)
    for name, body in changed.items():
        setattr(rewritten, name, body)
    if rewritten is not module:
        rewritten.recompile()
    return rewritten


def traced_bodies(module: GraphModule) -> list[tuple[str, GraphModule]]:
    """The bodies, by name, that are traced as part of the graph itself: not those of control flow that data decide."""
    return [
        (str(node.target), getattr(module, str(node.target)))
        for node in module.graph.nodes
        if _is_body(module, node)
    ]


def copy_module(module: GraphModule) -> GraphModule:
    """A module of the same parts with a graph of its own."""
    copied = lazy_module(module, copy.deepcopy(module.graph))
    copied.meta = module.meta
    return copied


def _is_body(module: GraphModule, node: Node) -> bool:
    return (
        node.op == "get_attr"
        and isinstance(getattr(module, str(node.target), None), GraphModule)
        and all(user.target not in DATA_DEPENDENT for user in node.users)
    )
