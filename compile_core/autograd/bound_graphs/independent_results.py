"""Results of one graph that share no operation which saves something: a backward through one leaves the others theirs.

To autograd a compiled graph is one node, and the engine frees all that it has saved when a backward has come through
it. In plain PyTorch it frees what the operations have saved that it came through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph

from gradsplit.compile_core.autograd.operators.gradient_sources import (
    Sources,
    inputs_that_matter,
)
from gradsplit.compile_core.ir.bit_sets import bit_set, is_within
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number, is_sized_by_data
from gradsplit.compile_core.ir.regions import graph_inputs
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


@dataclass(frozen=True)
class IndependentResults:
    """What the gradients of results read.

    Attributes:
        groups: of tangents, as bit sets: for each the positions of what their gradients read, among the saved tensors.
        specs: of the saved tensors; ``None`` where that depends on open sizes.
        graph: the backward.
        tangents: the names of its placeholders for them.
        tensors: of those for the saved tensors.
        defined_by: the sources of each gradient.
        is_sized_by_data: zeros for what nobody reads would not do: sizes are counted in it.
    """

    groups: dict[Sources, frozenset[int]]
    specs: tuple[TensorSpec | None, ...]
    graph: Graph
    tangents: tuple[str, ...]
    tensors: tuple[str, ...]
    defined_by: tuple[Sources, ...]
    is_sized_by_data: bool

    @staticmethod
    def of(graph: PartitionedGraph) -> IndependentResults | None:
        """``None`` if all results belong together."""
        backward = graph.backward
        assert backward is not None
        count = len(graph.signature.tangents)
        inputs = [node.name for node in graph_inputs(backward)]
        tangents = inputs[len(graph.saved) :][:count]
        every = bit_set(range(count))
        groups = graph.signature.tangent_groups
        if groups[0] == every:
            return None
        tensors = [node for node in graph_inputs(backward)[: len(graph.saved)] if not is_number(node)]
        specs = (TensorSpec.of(node.meta["val"]) for node in tensors)
        found = IndependentResults(
            {},
            tuple(None if spec.is_open else spec for spec in specs),
            backward.graph,
            tuple(tangents),
            tuple(node.name for node in tensors),
            graph.signature.gradient_tangents,
            any(is_sized_by_data(node.meta.get("val")) for node in backward.graph.nodes),
        )
        found.groups.update((group, found.read_without(every & ~group)) for group in set(groups))
        return found

    def read_without(self, absent: Sources) -> frozenset[int]:
        """The positions of what gradients read that depend on more than the ``absent`` tangents."""
        names = inputs_that_matter(self.graph, self.tangents, self.defined_by, absent)
        return frozenset(k for k, name in enumerate(self.tensors) if name in names)

    def to_keep(self, waiting: Iterable[Sources]) -> frozenset[int]:
        """The positions of what these groups read, or of everything where zeros would not do for the rest."""
        if self.is_sized_by_data:
            return frozenset(range(len(self.tensors)))
        return frozenset().union(*(self.groups[group] for group in waiting))

    def may_keep(self, absent: Sources) -> bool:
        """Whether a backward without these tangents leaves any for later: those that read nothing may always come."""
        return bool(absent) or not all(self.groups.values())

    def keep(self, saved: Sequence[torch.Tensor | None], absent: Sources) -> KeptValues | None:
        """The saved values that a later backward needs, after one without the ``absent`` tangents frees the rest."""
        waiting = {group for group, read in self.groups.items() if is_within(group, absent) or not read}
        if not waiting:
            return None
        read = self.to_keep(waiting)

        def kept(k: int, tensor: torch.Tensor) -> torch.Tensor | TensorSpec:
            if k not in read:
                return self.specs[k] or TensorSpec.of(tensor)
            # With its history a result of the graph would hold the node that holds it.
            return tensor if tensor.is_leaf else tensor.detach()

        values = [kept(k, tensor) for k, tensor in enumerate(saved) if tensor is not None]
        if len(values) < len(saved):
            return None
        versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in values]
        return KeptValues(self, waiting, values, versions)


@dataclass
class KeptValues:
    """What is saved for the groups that no backward has come to; of the rest of it, how it looked."""

    independent: IndependentResults
    waiting: set[Sources]
    values: list[torch.Tensor | TensorSpec]
    versions: list[int]

    def take(self, absent: Sources, keep_graph: bool) -> list[torch.Tensor] | None:
        """The saved tensors, with zeros for those that no waiting group reads; ``None`` if any other is asked for."""
        groups = self.independent.groups
        arrived = {group for group in groups if not is_within(group, absent)}
        if not arrived <= self.waiting:
            return None
        values = [*self.values]
        for k, value in enumerate(values):
            if isinstance(value, TensorSpec) or value._version == self.versions[k]:
                continue
            if k in self.independent.read_without(absent):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: [{value.type()} {[*value.shape]}] is at version {value._version}; expected "
                    f"version {self.versions[k]} instead"
                )
            values[k] = self.independent.specs[k] or TensorSpec.of(value)
        found = [value.empty().zero_() if isinstance(value, TensorSpec) else value for value in values]
        if not keep_graph:
            self.waiting -= {group for group in arrived if groups[group]}
            read = self.independent.to_keep(self.waiting)
            self.values = [
                value if isinstance(value, TensorSpec) or k in read else TensorSpec.of(value)
                for k, value in enumerate(self.values)
            ]
        return found
