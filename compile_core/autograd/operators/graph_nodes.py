"""Nodes of a traced graph: added by a pass, computed from others, in the memory of others, of the forward or not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx import traceback as node_metadata
from torch.fx.node import map_arg

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.attention_calls import AttentionCall

aten = torch.ops.aten


def add_call(
    graph: Graph, like: Node | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Node:
    """The call's node. It belongs where ``like`` does: to the same checkpoint, to the backward or not."""
    node = graph.call_function(function, args, kwargs)
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda read: read.meta["val"])
    node.meta = {**(like.meta if like is not None else {}), "val": function(*fake_args, **fake_kwargs)}
    return node


def ancestors(values: Iterable[Node], down_to: Container[Node] = ()) -> set[Node]:
    """The values and all that they are computed from, as far as the nodes ``down_to``."""
    found: set[Node] = set()
    frontier = list(values)
    while frontier:
        node = frontier.pop()
        if node not in found:
            found.add(node)
            if node not in down_to:
                frontier.extend(node.all_input_nodes)
    return found


def descendants(roots: Iterable[Node]) -> set[Node]:
    """The values and all that is computed from them."""
    found = set(roots)
    frontier = list(found)
    while frontier:
        for user in frontier.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                frontier.append(user)
    return found


def sources_first(wanted: Iterable[Node], among: Container[Node]) -> list[Node]:
    """The wanted nodes and what they are computed from, as far as it is ``among`` these, each after its sources; what
    need not be moved stays in its order."""
    placed: set[Node] = set()
    order: list[Node] = []
    for first in wanted:
        pending = [first]
        while pending:
            node = pending[-1]
            missing = [read for read in node.all_input_nodes if read in among and read not in placed]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if node not in placed:
                placed.add(node)
                order.append(node)
    return order


def copy_after_sources(wanted: Node, graph: Graph, copies: dict[Node, Node]) -> None:
    """Copies a node, after what it reads that was not copied yet."""
    pending = [wanted]
    while pending:
        node = pending[-1]
        missing = (
            [] if node in copies else [source for source in node.all_input_nodes if source not in copies]
        )
        if missing:
            pending.extend(reversed(missing))
            continue
        pending.pop()
        if node not in copies:
            if node.op == "placeholder":
                raise InternalError(f"a part of a graph needs {node}, which is not among its inputs")
            copies[node] = graph.node_copy(node, copies.__getitem__)


def memory_of(node: Node) -> Node:
    """The node whose memory a value lies in: the node itself unless it is a view."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: Node) -> Node | None:
    if node.op != "call_function":
        return None
    # Its results lie apart from one another.
    if node.target is operator.getitem and isinstance(getattr(node.args[0], "target", None), AttentionCall):
        return None
    # ``_unsafe_view`` promises that nobody will mind the sharing; a caller who gets both tensors would.
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


# Which operators of a joint graph the backward recorded.
#
# Most are known by their operands, which depend on a gradient that arrives. Of one without operands, as of
# ``torch.rand(n)`` in the backward of a function of the user's own, only the mark tells.

_MARK = "of_backward"


def marked_as_backward() -> AbstractContextManager[None]:
    """Operators that are recorded inside, under ``torch.fx.traceback.preserve_node_meta``, carry the mark."""
    return node_metadata.annotate({_MARK: True})


def mark_as_backward(node: Node) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: True}


def is_of_backward(node: Node) -> bool:
    return bool(node.meta.get("custom", {}).get(_MARK))


# Which operators belong to a backward that the program itself asks for, in the midst of a graph, and to which of them.

_OWN = "own_backward"


def marked_as_own_backward(number: int) -> AbstractContextManager[None]:
    """As ``marked_as_backward``."""
    return node_metadata.annotate({_OWN: number})


def own_backward_of(node: Node) -> int | None:
    return node.meta.get("custom", {}).get(_OWN)
