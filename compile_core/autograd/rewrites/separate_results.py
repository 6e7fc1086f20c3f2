"""Gives every result of a traced graph memory of its own.

Eager results are distinct tensors, which their owner may change in place. In the functional graph they may
have become one value: equal nodes were merged, and what only passes its argument on was dropped. A result
that would share memory with an input, a constant or an earlier result is therefore copied last.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call, memory_of
from gradsplit.compile_core.ir.numbers import is_number

aten = torch.ops.aten


def separate_results(module: GraphModule, num_outputs: int, tangents: Set[str]) -> GraphModule:
    """Inserts the copies; changes ``module`` and returns it.

    A gradient may be a tangent or serve two inputs, as in eager, where autograd copies it if it has to; but
    two gradients may not be two views of one memory, which autograd does not see.

    Args:
        module: a functional graph; its output node holds a flat tuple of values or ``None``.
        num_outputs: how many of these belong to the forward; the others are gradients.
        tangents: names of the placeholders that are gradients arriving from outside.
    """
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    owners: dict[Node, Node | None] = {}
    with module.graph.inserting_before(output):
        for position, result in enumerate(results):
            if result is None or is_number(result):
                continue
            memory = memory_of(result)
            is_output = position < num_outputs
            from_outside = memory.op in ("placeholder", "get_attr") and memory.name not in tangents
            shared = memory in owners and (is_output or owners[memory] is not result)
            if from_outside or shared:
                results[position] = add_call(module.graph, None, aten.clone.default, result)
            else:
                # What an output owns, no gradient may be.
                owners[memory] = None if is_output else result
    output.args = (tuple(results),)
    module.recompile()
    return module
