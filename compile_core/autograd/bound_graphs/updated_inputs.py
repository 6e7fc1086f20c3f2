"""Inputs whose new values the forward program stores itself, such as the running statistics of batch norms.

Autograd does not see these changes, no result of the graph is such a value, and the backward does not read the old one:
so they need not be outputs of the node in autograd's graph, of which a deep network would have hundreds, and a CUDA
graph holds the stores among its kernels. Where they were, the program returns ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.autograd.bound_graphs.returned_draws import Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph, replaced_inputs
from gradsplit.compile_core.torch_facts.autograd_engine import foreach_copy, tell_of_changes


def updated_inputs(graph: PartitionedGraph) -> dict[int, int]:
    """By position of the graph's output, the position of the primal of which it is the new value."""
    primals = [node.name for node in graph.forward.graph.find_nodes(op="placeholder")]
    uncounted = {mutation.input for mutation in graph.signature.mutated if not mutation.counted}
    return {
        output: position
        for output, position in replaced_inputs(graph.signature).items()
        if primals[position] not in graph.saved and position not in uncounted
    }


def updating(program: Program, graph: PartitionedGraph, updated: dict[int, int]) -> Program:
    """The forward program of ``graph``, which also stores the outputs ``updated`` into these inputs.

    Where the program has stored one there already, autograd is told only.
    """
    groups = copy_groups(graph, [(position, output) for output, position in updated.items()])
    if not groups:
        return program
    outputs = tuple(updated)

    def run(arguments: list[torch.Tensor]) -> Sequence[Any]:
        changed = [[arguments[position] for position in positions] for positions, _ in groups]
        results = [*program(arguments)]
        for tensors, (_, values) in zip(changed, groups, strict=True):
            store_values(tensors, [results[output] for output in values])
        for output in outputs:
            results[output] = None
        return results

    return run


def copy_groups(
    graph: PartitionedGraph, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Positions of primals, and of those outputs that replace them, one group a dtype, to be copied at once: fifty
    batch norms have a hundred and fifty."""
    primals = graph.forward.graph.find_nodes(op="placeholder")
    groups: dict[torch.dtype, list[tuple[int, int]]] = {}
    for position, output in pairs:
        groups.setdefault(primals[position].meta["val"].dtype, []).append((position, output))
    return tuple((tuple(p for p, _ in group), tuple(o for _, o in group)) for group in groups.values())


def store_values(changed: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Gives tensors their new values. Where the program has stored one there already, autograd is told only."""
    stored = [tensor for tensor, value in zip(changed, values, strict=True) if value is tensor]
    if not stored:
        foreach_copy(changed, values)
        return
    tell_of_changes(stored)
    pairs = [(tensor, value) for tensor, value in zip(changed, values, strict=True) if value is not tensor]
    if pairs:
        foreach_copy([tensor for tensor, _ in pairs], [value for _, value in pairs])
