"""A stage's backward in two programs: first the gradients of its inputs, then those of its weights.

The backward that ``partition`` cuts off the joint graph is cut once more: what the gradients of the inputs need is one
region, the rest, which only gradients of weights need, another. Where the forward is replayed as a CUDA graph, each of
them is, too: the second one reads what the forward and the first one keep in their recordings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import build_region, graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime.cuda_graphs import saved_source
from gradsplit.compile_core.runtime.executable import Region, link
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram, RecordedSource
from gradsplit.compile_core.torch_facts.dispatcher import acts

_INPUTS, _WEIGHTS = "backward_inputs", "backward_weights"


@dataclass(frozen=True)
class BackwardInTwo:
    """The two programs of a backward.

    Attributes:
        first: takes what the backward takes; returns the gradients of inputs, and then what ``second`` reads. None
            where all is left to that one, as in a first stage.
        second: takes what the backward takes, of which it may be given ``None`` for what it does not read, and then
            what ``first`` has returned for it; returns the gradients of weights. None where nothing is left to do.
        gradients: for each result of the backward, its position among the gradients of ``first``; -1 for none.
        read: positions of the backward's inputs that are kept for ``second``.
        weights: by result of ``second``, the positions, among the graph's inputs, of the weights whose gradient it is.
    """

    first: Program | None
    second: Program | None
    gradients: tuple[int, ...]
    read: frozenset[int]
    weights: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(
        graph: PartitionedGraph,
        forward: GraphedProgram | None,
        is_weight: Sequence[bool],
        compile_region: Callable[[Compute], Callable[[], Region]],
    ) -> BackwardInTwo:
        """Cuts and compiles the backward of ``graph``.

        Args:
            forward: the recorded forward, where the backward is to be recorded, too.
            is_weight: for each input of the graph.
        """
        backward = graph.backward
        assert backward is not None
        cut = _Cut.of(graph, is_weight)
        started = [compile_region(region) for region in cut.regions]
        regions = {region.name: finish() for region, finish in zip(cut.regions, started, strict=True)}
        taken = tuple(node.name for node in graph_inputs(backward))
        early = tuple(node.name for node in cut.early)
        handed_on = tuple(node.name for node in cut.handed_on)
        late = tuple(node.name for node in cut.late)
        first = None
        if early or _INPUTS in regions:
            first = _linked(_INPUTS, taken, (*early, *handed_on), cut.regions, regions)
        second = _linked(_WEIGHTS, (*taken, *handed_on), late, cut.regions, regions) if late else None
        read: Sequence[int] = range(len(taken))
        if forward is not None:
            first, second = _graphed(graph, forward, first, second, len(early), len(handed_on), len(late))
        else:
            needed = {name for region in cut.regions if region.name == _WEIGHTS for name in region.inputs}
            read = [position for position, name in enumerate(taken) if name in needed]
        places: dict[fx.Node | None, int] = {node: place for place, node in enumerate(cut.early)}
        return BackwardInTwo(
            first,
            second,
            tuple(places.get(node, -1) for node in cut.gradients),
            frozenset(read),
            tuple(
                tuple(
                    position
                    for position, node in zip(graph.signature.gradient_inputs, cut.gradients, strict=True)
                    if node is result
                )
                for result in cut.late
            ),
        )

    def run_first(self, inputs: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """The backward's results, with None for those that are left to do, and what ``run_second`` takes then."""
        left = None
        if self.second is not None:
            left = [value if position in self.read else None for position, value in enumerate(inputs)]
        results = [] if self.first is None else self.first(inputs)
        early = max(self.gradients, default=-1) + 1
        if left is not None:
            left += results[early:]
        return [None if k < 0 else results[k] for k in self.gradients], left

    def run_second(self, left: list[Any]) -> dict[int, torch.Tensor]:
        """The gradients of weights, by their position among the graph's inputs; empties the list."""
        assert self.second is not None
        results = self.second(left)
        return {
            position: gradient
            for positions, gradient in zip(self.weights, results, strict=True)
            for position in positions
        }


@dataclass(frozen=True)
class _Cut:
    """Where a backward is cut.

    Attributes:
        gradients: the backward's results.
        early: of these, what the first region computes, or what nothing computes, each once; ``late``: the second one.
        handed_on: what the second region reads of the first one.
    """

    gradients: tuple[fx.Node | None, ...]
    early: list[fx.Node]
    late: list[fx.Node]
    handed_on: list[fx.Node]
    regions: tuple[Compute, ...]

    @staticmethod
    def of(graph: PartitionedGraph, is_weight: Sequence[bool]) -> _Cut:
        assert graph.backward is not None
        gradients = tuple(graph_results(graph.backward))
        of_input = zip(graph.signature.gradient_inputs, gradients, strict=True)
        computed = [node for node in graph.backward.graph.nodes if node.op not in ("placeholder", "output")]
        wanted = [node for position, node in of_input if node is not None and not is_weight[position]]
        # Random numbers are drawn in the order of the whole backward, and what raises comes first.
        needed = ancestors([*wanted, *filter(acts, computed)])
        # What returns several values hands on these, not a tuple of them.
        needed.update(
            node for node in computed if node.target is operator.getitem and node.all_input_nodes[0] in needed
        )
        first = [node for node in computed if node in needed]
        second = [node for node in computed if node not in needed]
        of_weights = set(second)
        late = dict.fromkeys(node for node in gradients if node is not None and node in of_weights)
        early = dict.fromkeys(node for node in gradients if node is not None and node not in late)
        read_later = {source for node in second for source in node.all_input_nodes}
        handed_on = [node for node in first if node in read_later]
        regions = []
        if first:
            given = dict.fromkeys([*(node for node in early if node.op != "placeholder"), *handed_on])
            regions.append(build_region(_INPUTS, graph.backward, first, [*given]))
        if second:
            regions.append(build_region(_WEIGHTS, graph.backward, second, [*late]))
        return _Cut(gradients, [*early], [*late], handed_on, tuple(regions))


def _linked(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    computes: Sequence[Compute],
    regions: Mapping[str, Region],
) -> Program:
    own = tuple(compute for compute in computes if compute.name == name)
    return link(Schedule(name, inputs, own, outputs), regions)


def _graphed(
    graph: PartitionedGraph,
    forward: GraphedProgram,
    first: Program | None,
    second: Program | None,
    early: int,
    handed_on: int,
    late: int,
) -> tuple[Program | None, Program | None]:
    """Both, recorded as the forward is.

    Args:
        early, handed_on, late: how many gradients of inputs there are, values for the second program, and gradients of
            weights.
    """
    assert graph.backward is not None
    taken = len(graph_inputs(graph.backward))
    saved = saved_source(graph, forward)

    def graphed(
        name: str, program: Program, num_visible: int, hides: bool, sources: Sequence[RecordedSource]
    ) -> Any:
        return GraphedProgram(
            name,
            program,
            forward.recorder,
            num_visible,
            hides=hides,
            copied_in=range(len(graph.saved), taken),
            sources=sources,
            at_once=forward.at_once,
        )

    recorded, sources = None, [saved]
    if first is not None:
        recorded = graphed("CUDA graph of input gradients", first, early, second is not None, sources)
        sources = [saved, RecordedSource(recorded, {taken + k: early + k for k in range(handed_on)})]
    if second is not None:
        second = graphed("CUDA graph of weight gradients", second, late, False, sources)
    return recorded, second
