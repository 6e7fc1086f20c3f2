"""Copies that stand for views which no graph has: with negative strides, at a place or of a size that depends on data.

A copy is as good as long as nobody can tell: it and what it is a view of stay as they were, and it is not handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from gradsplit.compile_core.capture.values.base import CaptureState
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.numbers import is_sized_by_data


@dataclass(frozen=True)
class ViewCopy:
    """``node`` is the copy; ``versions`` are its own and those of what it may be a view of, when it was made.

    ``key`` says how it was taken, and that it may be handed out where nothing else of what it is a view of is.
    """

    node: Node
    versions: dict[Node, int]
    refusal: Unsupported
    key: tuple[Any, ...] = ()


def note_view_copy(
    state: CaptureState, copy: Node, bases: Sequence[Node], what: str, key: tuple[Any, ...] = ()
) -> None:
    versions = {node: version_of(node) for node in [copy, *bases]}
    refusal = state.unsupported("view-copy", f"{what} is more than read")
    state.view_copies.append(ViewCopy(copy, versions, refusal, key))


# They give a view where sizes and strides allow, else a copy.
_VIEWS_OR_COPIES = frozenset(["reshape", "reshape_as", "flatten", "ravel", "contiguous"])


def note_perhaps_view(state: CaptureState, target: Any, node: Node) -> None:
    """Of a tensor whose sizes depend on data, a copy in the graph may be a view to the program: where a dim has one
    element."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name not in _VIEWS_OR_COPIES or not is_sized_by_data(node.meta["example_value"]):
        return
    base = node.args[0]
    if isinstance(base, Node) and memory_of(base) != memory_of(node):
        note_view_copy(state, node, [base], f"a tensor that {name} may have made a view", (base,))


def stored_back(state: CaptureState, copied: Node, key: tuple[Any, ...]) -> None:
    """``x[i] += y`` has stored a copy where it was taken: both hold the same again, if nobody has looked meanwhile."""
    for copy in state.view_copies:
        if copy.node is copied and copy.key == key:
            base = key[0]
            between, read = copy.node.next, False
            while between is not base.graph._root and between.next is not base.graph._root:
                read = read or any(
                    isinstance(node.meta["example_value"], torch.Tensor)
                    and memory_of(node) == memory_of(base)
                    for node in between.all_input_nodes
                )
                between = between.next
            if not read:
                copy.versions.update({node: version_of(node) for node in copy.versions})


def check_view_copies(state: CaptureState, results: Iterable[Node]) -> None:
    """Refuse a graph in which such a copy, or what it is a view of, is changed after it was made, or that hands one
    out."""
    if not state.view_copies:
        return
    handed_out = set(map(memory_of, results))
    inputs = {
        memory_of(record.node) for record in state.graph.records if isinstance(record.real, torch.Tensor)
    }
    for copy in state.view_copies:
        own, memory = memory_of(copy.node), set(map(memory_of, copy.versions))
        changed = any(version_of(node) != version for node, version in copy.versions.items())
        leaves = own in handed_out
        if copy.key:
            leaves = leaves and bool((memory - {own}) & (handed_out | inputs))
        if changed or leaves or state.graph.changes_alias_in(memory):
            raise copy.refusal


def is_view_copy(state: CaptureState, node: Node) -> bool:
    """Whether a tensor lies in such a copy: its strides are not those of the view."""
    return memory_of(node) in {memory_of(copy.node) for copy in state.view_copies}


def version_of(node: Node) -> int:
    return int(node.meta["example_value"]._version)


def memory_of(node: Node) -> int:
    return int(node.meta["example_value"].untyped_storage()._cdata)


def nodes_in(arguments: Any) -> list[Node]:
    """The nodes among the arguments of a node, as often as they are."""
    found: list[Node] = []
    map_arg(arguments, found.append)
    return found
