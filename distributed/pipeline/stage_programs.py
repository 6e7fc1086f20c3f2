"""Compiles a stage: forward and backward, and input gradients and weight gradients as programs of their own.

A backward that the schedule wants whole is one program. Where it wants input gradients first, two others are made of it
(``backward_in_two``): when autograd's engine runs the backward, the first one runs, and what the second one takes is
kept until the schedule has it run. Which of the two ways it will be shows in the first step.

What is compiled serves all sizes for which the conditions hold that came up meanwhile; others make another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradsplit.compile_core import config
from gradsplit.compile_core.backends.registry import Backend, RegionBackend
from gradsplit.compile_core.capture import SizeHistory
from gradsplit.compile_core.export.conditions import compile_condition
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.many_sizes.open_backend import taking_open_sizes
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_module
from gradsplit.compile_core.runtime.executable import Region
from gradsplit.compile_core.runtime.graphed_program import MOST_AT_ONCE, GraphedProgram
from gradsplit.compile_core.torch_facts.autograd_engine import backward_from
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled
from gradsplit.distributed.pipeline.backward_in_two import BackwardInTwo
from gradsplit.distributed.pipeline.symbolic_inputs import SizedInput, SymbolicInputs

_WHOLE = "backward"


class StageBackward:
    """A stage's backward, whole and in two; a ``SchedulePlanner``.

    Args:
        is_weight: for each input of the graph.

    Attributes:
        in_flight: microbatches whose forward may have run, and whose backward not, or not all of it; that of a stage's
            first step counts.
        in_two: how the next backward runs; only once ``split`` has been called.
    """

    def __init__(self, is_weight: Sequence[bool]) -> None:
        self.in_two = False
        self.in_flight = MOST_AT_ONCE
        self._is_weight = is_weight
        self._left: list[WeightGradients] = []
        self._compile: Callable[[Compute], Callable[[], Region]] | None = None
        self._is_split = False
        # Backwards that were compiled before they are wanted in two.
        self._whole: list[_Backward] = []
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
        return whole_schedule(_WHOLE, graph.backward), None

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """See ``SchedulePlanner``; nobody waits for a stage but in collectives."""
        del what
        return nullcontext()

    def compiled_by(self, backend: RegionBackend) -> RegionBackend:
        """The backend, of which is kept how it compiles this."""
        opened = taking_open_sizes(backend, self.compiling)

        def compile_region(
            compute: Compute, options: CompileOptions, dump: StageDump
        ) -> Callable[[], Region]:
            self._compile = lambda part: opened.compile_region(part, options, dump)
            return opened.compile_region(compute, options, dump)

        return replace(opened, compile_region=compile_region)

    def backward_program(self, graph: PartitionedGraph, forward: Program, backward: Program) -> Program:
        """Either way, as ``in_two`` says; see ``SchedulePlanner``."""
        assert self._compile is not None
        compile_region = self._compile
        recorded = forward if isinstance(backward, GraphedProgram) else None
        assert recorded is None or isinstance(recorded, GraphedProgram)
        made = _Backward(
            self,
            backward,
            lambda: BackwardInTwo.of(graph, recorded, self._is_weight, compile_region),
        )
        if self._is_split:
            made.split()
        else:
            self._whole.append(made)
        return made

    def split(self) -> None:
        """From here on backwards are compiled in two, too."""
        self._is_split = True
        for backward in self._whole:
            backward.split()
        self._whole.clear()

    def keep(self, left: WeightGradients) -> None:
        """A backward has left these."""
        self._left.append(left)

    def take_weights(self) -> list[WeightGradients]:
        """What the backwards since the last call have left."""
        left, self._left = self._left, []
        return left


class _Backward:
    """A compiled backward, run whole or in two.

    Attributes:
        restored: what a recorded program knows of what was saved for it; see ``GraphedProgram``.
    """

    def __init__(self, stage: StageBackward, whole: Program, make_two: Callable[[], BackwardInTwo]) -> None:
        self._stage, self._run_whole, self._make_two = stage, whole, make_two
        self._two: BackwardInTwo | None = None
        restored = getattr(whole, "restored", None)
        if restored is not None:
            self.restored = restored

    def split(self) -> None:
        self._two = self._make_two()
        if isinstance(self._run_whole, GraphedProgram):
            self._run_whole.keep_apart()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if not self._stage.in_two or self._two is None:
            return self._run_whole(inputs)
        gradients, left = self._two.run_first(inputs)
        if left is not None:
            self._stage.keep(WeightGradients(self._stage, self._two, left, self._stage.inputs))
        return gradients


@dataclass(frozen=True)
class WeightGradients:
    """The rest of one backward, still to be run."""

    backward: StageBackward
    two: BackwardInTwo
    arguments: list[Any]
    inputs: Sequence[torch.Tensor]

    def run(self) -> None:
        """Runs it, and hands the gradients to autograd, which adds them up and calls hooks."""
        with torch.no_grad():
            gradients = self.two.run_second(self.arguments)
        edges = [self.backward.edge_of(position, self.inputs[position]) for position in gradients]
        backward_from(edges, [*gradients.values()])


@dataclass(frozen=True)
class _Form:
    """A compiled graph, for calls with or without gradients of which something holds."""

    with_gradients: bool
    holds: Callable[[Sequence[torch.Tensor], dict[str, Any]], bool]
    run: Callable[..., Sequence[torch.Tensor]]


class StageProgram:
    """A stage's graph, compiled: called with its inputs, it returns the graph's results, in autograd's graph.

    Args:
        open_dims: by position of an input, the dims whose sizes differ between calls.

    Attributes:
        backward: what a backward through them runs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        is_weight: Sequence[bool],
        request: CompileRequest,
        open_dims: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.backward = StageBackward(is_weight)
        self._graph, self._request, self._open_dims = graph, request, open_dims or {}
        self._history = SizeHistory()
        # The one that was compiled last is the first.
        self._forms: list[_Form] = []

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.backward.inputs = inputs
        with_gradients = torch.is_grad_enabled()
        for form in self._forms:
            if form.with_gradients == with_gradients and form.holds(inputs, {}):
                return form.run(*inputs)
        form = self._compile(inputs, with_gradients)
        self._forms = [form, *self._forms[: config.cache_size_limit - 1]]
        return form.run(*inputs)

    def _compile(self, inputs: Sequence[torch.Tensor], with_gradients: bool) -> _Form:
        copy = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            # Where gradients are off, a no_grad block of the program does not turn them on at its end.
            if with_gradients or node.target is not set_grad_enabled:
                copies[node] = copy.node_copy(node, copies.__getitem__)
        symbols = SymbolicInputs(
            [
                SizedInput.of(given, f"args[{k}]", self._open_dims.get(k, ()))
                for k, given in enumerate(inputs)
            ],
            self._history,
        )
        for node, example in zip(copy.find_nodes(op="placeholder"), symbols.fakes, strict=True):
            node.meta["example_value"] = example
        backend: Backend = self._request.backend
        if isinstance(backend, RegionBackend) and with_gradients:
            backend = self.backward.compiled_by(backend)
        # Torch's generator has the state that the unsplit model would have, so torch's operators draw.
        options = replace(self._request.options, fallback_random=True)
        run = compile_module(
            fx.GraphModule({}, copy),
            symbols.fakes,
            inputs,
            backend=backend,
            options=options,
            planner=self.backward,
        )
        conditions = " and ".join(f"({text})" for text in symbols.conditions()) or "True"
        return _Form(with_gradients, compile_condition(conditions), run)
