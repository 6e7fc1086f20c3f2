"""Tensors of which plain PyTorch does not notice that they are changed between a forward and its backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.torch_facts.autograd_engine import reaching_roots


def unnoticed(
    roots: Sequence[torch.Tensor], *groups: Mapping[int, torch.Tensor]
) -> tuple[dict[int, int], ...]:
    """For the keys, in each group, of tensors in whose memory not every root's operations have saved anything: those
    roots, as a bit set of their positions. A backward through them does not notice that the tensor was changed.

    Args:
        roots: results of a run with autograd, which lives as long as these.
        groups: tensors of this run.
    """
    memories = _saved_memories(roots)
    if memories is None:
        return tuple({} for _ in groups)
    everyone = (1 << len(roots)) - 1
    found = (
        {k: everyone & ~memories.get(tensor.untyped_storage()._cdata, 0) for k, tensor in group.items()}
        for group in groups
    )
    return tuple({k: others for k, others in group.items() if others} for group in found)


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
    memories = _saved_memories([result for result in results if isinstance(result, torch.Tensor)])
    if memories is None or not written.isdisjoint(memories.keys()):
        raise Unsupported(
            "unseen-change",
            "the program changes a tensor through .data that a backward may read",
            "change it under torch.no_grad(), which autograd notices",
        )


def _saved_memories(roots: Sequence[torch.Tensor]) -> dict[int, int] | None:
    """Where operations have saved something -> the positions of the roots that they lead to, as a bit set.

    ``None`` where that is not to be known.
    """
    try:
        reached = reaching_roots(roots)
    except RuntimeError:  # of a view of a leaf that was changed otherwise: autograd gives it no history
        return None
    memories: dict[int, int] = {}
    for node, positions in reached.items():
        for saved in _saved_by(node):
            if isinstance(saved, torch.Tensor):
                memory = saved.untyped_storage()._cdata
                memories[memory] = memories.get(memory, 0) | positions
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
