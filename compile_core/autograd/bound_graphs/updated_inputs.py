"""Inputs whose new values the forward program stores itself, such as the running statistics of batch norms.

Autograd does not see these changes, no result of the graph is such a value, and the backward does not read the old one:
so they need not be outputs of the node in autograd's graph, of which a deep network would have hundreds, and a CUDA
graph holds the stores among its kernels. Where they were, the program returns ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph, replaced_inputs
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory, sharing
from gradsplit.compile_core.torch_facts.autograd_engine import foreach_copy, tell_of_changes


def updated_inputs(graph: PartitionedGraph) -> dict[int, int]:
    """By position of the graph's output, the position of the primal of which it is the new value."""
    primals = [node.name for node in graph.forward.graph.find_nodes(op="placeholder")]
    return {
        output: position
        for output, position in replaced_inputs(graph.signature).items()
        if primals[position] not in graph.saved
    }


def updating(program: Program, graph: PartitionedGraph, updated: dict[int, int]) -> Program:
    """The forward program of ``graph``, which also stores the outputs ``updated`` into these inputs.

    Where the program has stored one there already, autograd is told only.
    """
    groups = copy_groups(graph, [(position, output) for output, position in updated.items()])
    return UpdatingProgram(program, tuple(groups), tuple(updated)) if groups else program


@dataclass(frozen=True)
class UpdatingProgram:
    """A program that stores some of its outputs into its inputs.

    Attributes:
        groups: which.
        outputs: their positions.
    """

    program: Program
    groups: tuple[CopyGroup, ...]
    outputs: tuple[int, ...]

    def __call__(self, arguments: list[torch.Tensor]) -> Sequence[Any]:
        changed = [[arguments[position] for position in group.inputs] for group in self.groups]
        results = [*self.program(arguments)]
        for tensors, group in zip(changed, self.groups, strict=True):
            group.store(tensors, results)
        for output in self.outputs:
            results[output] = None
        return results

    def sharing(self, memory: TemporaryMemory) -> UpdatingProgram:
        """See ``SharingProgram``."""
        return replace(self, program=sharing(self.program, memory))


@dataclass(frozen=True)
class CopyGroup:
    """Inputs of one dtype that get their new values at once: fifty batch norms have a hundred and fifty.

    Attributes:
        inputs: positions of the primals.
        outputs: positions of those outputs that replace them.
        counted: their versions count the change.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    counted: bool

    def store(self, changed: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Gives the inputs ``changed`` their new values, which a program may have stored in some of them already."""
        pairs = [(tensor, outputs[k]) for tensor, k in zip(changed, self.outputs, strict=True)]
        left = [(tensor, value) for tensor, value in pairs if value is not tensor]
        if self.counted and len(left) < len(pairs):
            tell_of_changes([tensor for tensor, value in pairs if value is tensor])
        if left:
            targets = [tensor if self.counted else tensor.data for tensor, _ in left]
            foreach_copy(targets, [value for _, value in left])


def copy_groups(graph: PartitionedGraph, pairs: Sequence[tuple[int, int]]) -> tuple[CopyGroup, ...]:
    """Groups for positions of primals, and of those outputs that replace them."""
    primals = graph.forward.graph.find_nodes(op="placeholder")
    counted = {change.input: change.counted for change in graph.signature.mutated}
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
    for position, output in pairs:
        key = primals[position].meta["val"].dtype, counted[position]
        groups.setdefault(key, []).append((position, output))
    return tuple(
        CopyGroup(tuple(p for p, _ in group), tuple(o for _, o in group), is_counted)
        for (_, is_counted), group in groups.items()
    )
