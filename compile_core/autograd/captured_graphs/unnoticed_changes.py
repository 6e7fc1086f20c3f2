"""Tensors of which plain PyTorch does not notice that they are changed between a forward and its backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule

from gradsplit.compile_core.errors import Unsupported


def unnoticed(
    roots: Iterable[torch.Tensor], *groups: Mapping[int, torch.Tensor]
) -> tuple[frozenset[int], ...]:
    """The keys, in each group, of tensors in whose memory no operation has saved anything.

    Args:
        roots: results of a run with autograd, which lives as long as these.
        groups: tensors of this run.
    """
    memories = _saved_memories(roots)
    if memories is None:
        return tuple(frozenset() for _ in groups)
    return tuple(
        frozenset(k for k, tensor in group.items() if tensor.untyped_storage()._cdata not in memories)
        for group in groups
    )


def refuse_changes_of_what_is_saved(module: GraphModule) -> None:
    """Refuses a program that changes through ``.data`` what an operation of it has saved: a backward of plain PyTorch's
    reads what is there by then. (One that changes it before is refused, too.)"""
    nodes = module.graph.find_nodes(op="call_function", target=getattr)
    read = [node.meta["example_value"] for node in nodes if node.args[1] == "data"]
    written = {tensor.untyped_storage()._cdata for tensor in read if tensor._version}
    if not written:
        return
    (output,) = module.graph.find_nodes(op="output")
    results = (node.meta["example_value"] for node in output.args[0])
    memories = _saved_memories(result for result in results if isinstance(result, torch.Tensor))
    if memories is None or not written.isdisjoint(memories):
        raise Unsupported(
            "unseen-change",
            "the program changes a tensor through .data that a backward may read",
            "change it under torch.no_grad(), which autograd notices",
        )


def _saved_memories(roots: Iterable[torch.Tensor]) -> set[int] | None:
    """``None`` where that is not to be known."""
    try:
        nodes: list[Any] = [root.grad_fn for root in roots]
    except RuntimeError:  # of a view of a leaf that was changed otherwise: autograd gives it no history
        return None
    seen: set[Any] = {None}
    memories: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [further for further, _ in node.next_functions]
        for saved in _saved_by(node):
            if isinstance(saved, torch.Tensor):
                memories.add(saved.untyped_storage()._cdata)
            elif saved is not None:
                return None  # who knows what a hook for saved tensors reads
    return memories


def _saved_by(node: Any) -> Iterator[Any]:
    for name in _names_of_saved(type(node)):
        found = getattr(node, name)
        for each in found if isinstance(found, (tuple, list)) else [found]:
            yield None if each is None else each.data
    if isinstance(node, BackwardCFunction):
        # What a function of the user's keeps itself it reads as it is by then.
        yield from (value for value in vars(node).values() if isinstance(value, torch.Tensor))


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
