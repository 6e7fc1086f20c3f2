"""Compiles a stage: forward, input gradients and weight gradients are programs of their own.

The backward that ``partition`` cuts off the joint graph is cut once more: what the gradients of the stage's inputs need
is one region, the rest, which only gradients of weights need, another. Where autograd's engine runs the backward, the
first one runs, and what the second one takes is kept until the schedule has it run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.backends.registry import Backend, RegionBackend
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import build_region, graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_module
from gradsplit.compile_core.runtime.executable import Region
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.fake_tensors import fakes_like
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled

_INPUTS, _WEIGHTS = "backward_inputs", "backward_weights"


class BackwardInTwo:
    """A ``SchedulePlanner``: a region for the gradients of inputs, and one for the other gradients of weights.

    Args:
        is_weight: for each input of the graph.

    Attributes:
        results_of: of each result of the second region the positions, among the graph's inputs, of the weights whose
            gradient it is.
    """

    def __init__(self, is_weight: Sequence[bool]) -> None:
        self._is_weight = is_weight
        self.results_of: list[list[int]] = []

    def plan_backward(self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> tuple[Schedule, None]:
        """See ``SchedulePlanner``."""
        assert graph.backward is not None
        gradients = graph_results(graph.backward)
        of_input = list(zip(graph.signature.gradient_inputs, gradients, strict=True))
        computed = [node for node in graph.backward.graph.nodes if node.op not in ("placeholder", "output")]
        early = [node for position, node in of_input if node is not None and not self._is_weight[position]]
        needed = ancestors([*early, *filter(is_random, computed)])
        first = [node for node in computed if node in needed]
        second = [node for node in computed if node not in needed]
        read_later = {*gradients, *(source for node in second for source in node.all_input_nodes)}
        late = set(second)
        results = list(dict.fromkeys(node for node in gradients if node is not None and node in late))
        regions = []
        if first:
            handed_on = [node for node in first if node in read_later]
            regions.append(build_region(_INPUTS, graph.backward, first, handed_on))
        if second:
            regions.append(build_region(_WEIGHTS, graph.backward, second, results))
        self.results_of = [[position for position, node in of_input if node is result] for result in results]
        names = tuple(None if node is None else node.name for node in gradients)
        taken = tuple(node.name for node in graph_inputs(graph.backward))
        return Schedule("backward", taken, tuple(regions), names), None


@dataclass(frozen=True)
class WeightGradients:
    """The rest of one backward, still to be run."""

    region: Region
    arguments: list[Any]
    results_of: Sequence[Sequence[int]]
    inputs: Sequence[torch.Tensor]

    def run(self) -> None:
        """Runs it, and hands the gradients to autograd, which adds them up and calls hooks."""
        with torch.no_grad():
            results = self.region(self.arguments)
        pairs = [
            (self.inputs[position], result)
            for positions, result in zip(self.results_of, results, strict=True)
            for position in positions
        ]
        edges = [get_gradient_edge(weight) for weight, _ in pairs]
        gradients = [gradient for _, gradient in pairs]
        del results, pairs
        torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]


class StageProgram:
    """A stage's graph, compiled: called with its inputs, it returns the graph's results, in autograd's graph.

    A backward through them gives gradients to inputs that are no weights; those of weights are left for
    ``take_weights``, but for some that come out on the way.
    """

    def __init__(self, graph: fx.Graph, is_weight: Sequence[bool], request: CompileRequest) -> None:
        self._graph, self._is_weight, self._request = graph, is_weight, request
        self._left: list[WeightGradients] = []
        self._runs: dict[bool, Callable[..., Sequence[torch.Tensor]]] = {}
        self._inputs: Sequence[torch.Tensor] = ()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self._inputs = inputs
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in self._runs:
            self._runs[with_gradients] = self._compile(inputs, with_gradients)
        return self._runs[with_gradients](*inputs)

    def take_weights(self) -> list[WeightGradients]:
        """What the backwards since the last call have left."""
        left, self._left = self._left, []
        return left

    def _compile(
        self, inputs: Sequence[torch.Tensor], with_gradients: bool
    ) -> Callable[..., Sequence[torch.Tensor]]:
        copy = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            # Where gradients are off, a no_grad block of the program does not turn them on at its end.
            if with_gradients or node.target is not set_grad_enabled:
                copies[node] = copy.node_copy(node, copies.__getitem__)
        examples = fakes_like(inputs)
        for node, example in zip(copy.find_nodes(op="placeholder"), examples, strict=True):
            node.meta["example_value"] = example
        planner = BackwardInTwo(self._is_weight)
        backend: Backend = self._request.backend
        if isinstance(backend, RegionBackend):
            backend = self._leaving_weights(backend, planner)
        # Torch's generator has the state that the unsplit model would have, so torch's operators draw.
        options = replace(self._request.options, fallback_random=True)
        return compile_module(
            fx.GraphModule({}, copy), examples, inputs, backend=backend, options=options, planner=planner
        )

    def _leaving_weights(self, backend: RegionBackend, planner: BackwardInTwo) -> RegionBackend:
        """The backend, whose region of weight gradients only keeps what it is given."""

        def compile_region(
            compute: Compute, options: CompileOptions, dump: StageDump
        ) -> Callable[[], Region]:
            finish = backend.compile_region(compute, options, dump)
            return finish if compute.name != _WEIGHTS else lambda: self._leaving(finish(), planner)

        return replace(backend, compile_region=compile_region)

    def _leaving(self, region: Region, planner: BackwardInTwo) -> Region:
        def leave(arguments: list[Any]) -> Sequence[Any]:
            self._left.append(WeightGradients(region, [*arguments], planner.results_of, self._inputs))
            arguments.clear()
            return [None] * len(planner.results_of)

        return leave
