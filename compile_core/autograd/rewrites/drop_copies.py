"""Leaves out copies that change neither values nor layout: in a functional graph they are as good as the original.

A copy of a transposed copy is first made one of the original, whose layout it then often has: what a program turns to
one layout and back is not moved at all.

Copies of inputs stay, since an input may be changed after the graph has run, those in checkpoints, which the
partition's orders name, and those of a part, which lets go of the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call, memory_of
from gradsplit.compile_core.autograd.operators.region_marks import mark_of
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten

# Views that a tensor of any layout has.
_TURNS = frozenset(
    {aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim}
)


def drop_copies(graph: Graph) -> None:
    """Changes ``graph``; what it leaves out stays there as dead nodes."""
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        spec = TensorSpec.of(node.meta["val"])
        if mark_of(node) is not None or spec.is_open:
            continue
        source = _of_original(node.args[0])
        value = source.meta["val"]
        same = TensorSpec.of(value).is_laid_out_as(spec) and value.untyped_storage().nbytes() <= spec.bytes
        if same and memory_of(source).op == "call_function":
            node.replace_all_uses_with(source)
            continue
        # A copy may keep the order of what it copies, which the original need not have.
        for settings in (node.kwargs, {"memory_format": torch.contiguous_format}):
            if TensorSpec.of(node.target(value, **settings)).is_laid_out_as(spec):
                node.args, node.kwargs = (source,), settings
                break


def _of_original(value: Any) -> Any:
    """A view of a copy as the same view of what was copied, where nobody else reads the copy."""
    turns: list[Any] = []
    copy = value
    while copy.target in _TURNS and len(copy.users) == 1:
        turns.append(copy)
        copy = copy.args[0]
    if copy.target is not aten.clone.default or len(copy.users) != 1 or mark_of(copy) is not None:
        return value
    original = copy.args[0]
    for turn in reversed(turns):
        with turn.graph.inserting_before(turn):
            original = add_call(turn.graph, turn, turn.target, original, *turn.args[1:])
    return original
