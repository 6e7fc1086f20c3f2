"""Compiles a stage: forward and backward, and input gradients and weight gradients as programs of their own.

A backward that the schedule wants whole is one program. Where it wants input gradients first, the backward that
``partition`` cuts off the joint graph is cut once more: what the gradients of the inputs need is one region, the
rest, which only gradients of weights need, another. Where autograd's engine runs the backward, the first one runs, and
what the second one takes is kept until the schedule has it run. Which of the two it will be shows in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.backends.registry import Backend, RegionBackend
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import build_region, graph_results, whole_schedule
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.many_sizes.open_backend import taking_open_sizes
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_module
from gradsplit.compile_core.runtime.executable import Executable, Region, link
from gradsplit.compile_core.torch_facts.autograd_engine import backward_from
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.fake_tensors import fakes_like
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled

_WHOLE, _INPUTS, _WEIGHTS = "backward", "backward_inputs", "backward_weights"


class StageBackward:
    """A stage's backward, whole and in two; a ``SchedulePlanner``.

    Args:
        is_weight: for each input of the graph.

    Attributes:
        in_two: how the next backward runs; only once ``split`` has been called.
        can_split: whether there is anything to split: a graph with a backward that a backend compiles in regions.
    """

    def __init__(self, is_weight: Sequence[bool]) -> None:
        self.in_two = self.can_split = False
        self._is_weight = is_weight
        self._left: list[WeightGradients] = []
        self._graph: PartitionedGraph | None = None
        self._compile: Callable[[Compute], Callable[[], Region]] | None = None
        self._compute: Compute | None = None
        self._two: Executable | None = None
        self.inputs: Sequence[torch.Tensor] = ()
        # By position, a weight and where its gradient goes.
        self._edges: dict[int, tuple[torch.Tensor, GradientEdge]] = {}

    def edge_of(self, position: int, weight: torch.Tensor) -> GradientEdge:
        """Where the gradient of a weight goes: torch takes a view of it to find out, so once will do."""
        known = self._edges.get(position)
        if known is None or known[0] is not weight:
            known = self._edges[position] = weight, get_gradient_edge(weight)
        return known[1]

    def plan_backward(self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> tuple[Schedule, None]:
        """See ``SchedulePlanner``."""
        assert graph.backward is not None
        self._graph = graph
        return whole_schedule(_WHOLE, graph.backward), None

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """See ``SchedulePlanner``; nobody waits for a stage but in collectives."""
        del what
        return nullcontext()

    def compiled_by(self, backend: RegionBackend) -> RegionBackend:
        """The backend, whose backward is this."""
        opened = taking_open_sizes(backend, self.compiling)

        def compile_region(
            compute: Compute, options: CompileOptions, dump: StageDump
        ) -> Callable[[], Region]:
            finish = opened.compile_region(compute, options, dump)
            if compute.name != _WHOLE:
                return finish
            self.can_split, self._compute = True, compute
            self._compile = lambda part: opened.compile_region(part, options, dump)
            return lambda: self._choosing(finish())

        return replace(opened, compile_region=compile_region)

    def split(self) -> None:
        """Compiles the backward in two, too."""
        if not self.can_split or self._two is not None:
            return
        assert self._graph is not None and self._compute is not None and self._compile is not None
        parts, results_of = self._parts(self._graph)
        started = {part.name: self._compile(part) for part in parts}
        regions = {name: finish() for name, finish in started.items()}
        if _WEIGHTS in regions:
            regions[_WEIGHTS] = self._leaving(regions[_WEIGHTS], results_of)
        schedule = Schedule(_WHOLE, self._compute.inputs, parts, self._compute.outputs)
        self._two = link(schedule, regions)

    @property
    def is_split(self) -> bool:
        return self._two is not None

    def take_weights(self) -> list[WeightGradients]:
        """What the backwards since the last call have left."""
        left, self._left = self._left, []
        return left

    def _parts(self, graph: PartitionedGraph) -> tuple[tuple[Compute, ...], list[list[int]]]:
        """The two regions, and of each result of the second one the positions, among the graph's inputs, of the weights
        whose gradient it is."""
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
        return tuple(regions), [
            [position for position, node in of_input if node is result] for result in results
        ]

    def _choosing(self, whole: Region) -> Region:
        def run(arguments: list[Any]) -> Sequence[Any]:
            return self._two(arguments) if self.in_two and self._two is not None else whole(arguments)

        return run

    def _leaving(self, region: Region, results_of: Sequence[Sequence[int]]) -> Region:
        """Only keeps what it is given."""

        def leave(arguments: list[Any]) -> Sequence[Any]:
            self._left.append(WeightGradients(self, region, [*arguments], results_of, self.inputs))
            arguments.clear()
            return [None] * len(results_of)

        return leave


@dataclass(frozen=True)
class WeightGradients:
    """The rest of one backward, still to be run."""

    backward: StageBackward
    region: Region
    arguments: list[Any]
    results_of: Sequence[Sequence[int]]
    inputs: Sequence[torch.Tensor]

    def run(self) -> None:
        """Runs it, and hands the gradients to autograd, which adds them up and calls hooks."""
        with torch.no_grad():
            results = self.region(self.arguments)
        weights = [position for positions in self.results_of for position in positions]
        gradients = [
            result for positions, result in zip(self.results_of, results, strict=True) for _ in positions
        ]
        del results
        backward_from([self.backward.edge_of(k, self.inputs[k]) for k in weights], gradients)


class StageProgram:
    """A stage's graph, compiled: called with its inputs, it returns the graph's results, in autograd's graph.

    Attributes:
        backward: what a backward through them runs.
    """

    def __init__(self, graph: fx.Graph, is_weight: Sequence[bool], request: CompileRequest) -> None:
        self.backward = StageBackward(is_weight)
        self._graph, self._request = graph, request
        self._runs: dict[bool, Callable[..., Sequence[torch.Tensor]]] = {}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.backward.inputs = inputs
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in self._runs:
            self._runs[with_gradients] = self._compile(inputs, with_gradients)
        return self._runs[with_gradients](*inputs)

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
        backend: Backend = self._request.backend
        if isinstance(backend, RegionBackend) and with_gradients:
            backend = self.backward.compiled_by(backend)
        # Torch's generator has the state that the unsplit model would have, so torch's operators draw.
        options = replace(self._request.options, fallback_random=True)
        return compile_module(
            fx.GraphModule({}, copy),
            examples,
            inputs,
            backend=backend,
            options=options,
            planner=self.backward,
        )
