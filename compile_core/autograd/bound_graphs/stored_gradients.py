"""Gradients that a backward program stores in a communicator's destinations, and does not return to autograd's engine.

To autograd such a program does not have these inputs. So the engine does not visit them, and reaches their accumulation
only where a gradient comes from elsewhere, too; the communicator can ask it whether it will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsplit.compile_core.autograd.operators.gradient_sources import results_of
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.bit_sets import members
from gradsplit.compile_core.ir.communicator import Communicator, Destinations, WantedValues
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.pick import Pick, picker
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.torch_facts.dispatcher import acts


@dataclass(frozen=True)
class StoredGradients:
    """Those of one program.

    Attributes:
        names: the destinations.
        positions: by name, that of the gradient among those that the backward computes.
        anchor: what autograd's graph has in the place of these inputs.
        others: positions of the inputs whose gradients autograd gets.
        others_computed: positions of their gradients among those that the backward computes.
        results_of: for each name, the positions of the program's results on whose gradients it depends.
    """

    communicator: Communicator
    names: tuple[str, ...]
    positions: Mapping[str, int]
    anchor: torch.Tensor
    others: tuple[int, ...]
    pick_others: Pick
    others_computed: tuple[int, ...]
    results_of: Mapping[str, tuple[int, ...]]
    _without_unwanted: dict[frozenset[str], torch.fx.GraphModule] = field(default_factory=dict, repr=False)

    def only_wanted(self, backward: torch.fx.GraphModule, wanted: frozenset[str]) -> torch.fx.GraphModule:
        """The backward without what only computes gradients that are stored and not among these."""
        if wanted not in self._without_unwanted:
            graph = torch.fx.Graph()
            kept = {*self.others_computed, *(self.positions[name] for name in wanted)}
            results: Any = graph.graph_copy(backward.graph, {})
            graph.output([result if k in kept else None for k, result in enumerate(results)])
            graph.eliminate_dead_code(lambda node: node.is_impure() or acts(node))
            self._without_unwanted[wanted] = torch.fx.GraphModule(backward, graph)
        return self._without_unwanted[wanted]

    def give_values(self, gradients: Sequence[torch.Tensor | None], wanted: WantedValues) -> None:
        """Hands over what the backward has computed instead of storing it."""
        for name, take in wanted.items():
            if (value := gradients[self.positions[name]]) is not None:
                take(value)

    def begin(self, node: Any, absent: set[int]) -> Destinations:
        """The engine runs the backward of ``node``; no gradients came to these results of it, so what depends on
        nothing else is undefined."""
        found = self.results_of.items() if absent else ()
        undefined = {name: results for name, results in found if results and absent.issuperset(results)}
        return self.communicator.begin(node, undefined)

    @staticmethod
    def of(
        graph: PartitionedGraph, backward: Schedule, communicator: Communicator | None
    ) -> StoredGradients | None:
        """Those of a scheduled backward of ``graph``; ``None`` if it has no destinations.

        Raises:
            InternalError: it has some, and there is no communicator.
        """
        if not backward.destinations:
            return None
        if communicator is None:
            raise InternalError(f"schedule {backward.name} has destinations, but no communicator was given")
        # The engine visits those, too, to which functions of the program give nothing: whoever waits there is told.
        to_engine = {k for k, output in enumerate(backward.outputs) if output is not None}
        computed = tuple(sorted(to_engine.union(graph.signature.left_undefined)))
        others = tuple(graph.signature.gradient_inputs[k] for k in computed)
        tangents, sources = graph.signature.tangents, graph.signature.gradient_tangents
        results_by_name = {
            name: tuple(tangents[k] for k in members(results_of(sources[position], len(tangents))))
            for name, position in backward.stored.items()
        }
        return StoredGradients(
            communicator,
            backward.destinations,
            backward.stored,
            communicator.anchor(backward.destinations),
            others,
            picker(others),
            computed,
            results_by_name,
        )
