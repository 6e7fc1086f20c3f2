"""A captured graph, compiled for calls whose gradients are reduced.

One graph may serve several modules of one class, whose gradients go to places of their own, and parameters that have
hooks now and none in the next step: it is compiled in a form for each set of parameters.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.capture import normal_tensors
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.ir.pick import picker
from gradsplit.compile_core.many_sizes.graph_of_many_sizes import GraphOfManySizes
from gradsplit.compile_core.pipeline import CompiledGraph, compile_graph
from gradsplit.distributed.agreement.agreement import Agreement
from gradsplit.distributed.planning.ddp_planner import DDPPlanner

logger = logging.getLogger(__name__)

# How many forms a graph is compiled in, for as many sets of parameters.
_MOST_FORMS = 256


@dataclass(frozen=True)
class _GraphForm:
    parameters: tuple[Any, ...]
    hooked: frozenset[str]
    program: Any


class GraphForms:
    """The forms of one graph; called with its inputs, it runs the one for these.

    Args:
        captured: the graph.
        request: how it is compiled.
        planner: of the module.
        agreement: of the module's ranks, which wait for one that compiles.
        inputs: of the first call, for which it is compiled at once.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        request: CompileRequest,
        planner: DDPPlanner,
        agreement: Agreement,
        inputs: Sequence[Any],
    ) -> None:
        self._captured = captured
        self._request = request
        self._planner = planner
        self._agreement = agreement
        self._forms: list[_GraphForm] = []
        positions = [k for k, given in enumerate(inputs) if isinstance(given, torch.nn.Parameter)]
        self._pick_parameters = picker(positions)
        self._form_for(inputs)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """What was compiled."""
        return [
            program
            for form in self._forms
            if isinstance(form.program, (CompiledGraph, GraphOfManySizes))
            for program in form.program.programs
        ]

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        program = self._form_for(inputs)
        if isinstance(program, GraphOfManySizes) and not program.is_compiled_for(inputs):
            with self._agreement.compiling("compiles another size of a graph"):
                program.compiled_for(inputs)
        return program(*inputs)

    def _form_for(self, inputs: Sequence[Any]) -> Any:
        parameters, hooked = self._pick_parameters(inputs), self._planner.hooked
        for form in self._forms:
            if hooked == form.hooked and all(map(operator.is_, form.parameters, parameters)):
                return form.program
        if len(self._forms) == _MOST_FORMS:
            logger.warning(
                "a graph that serves more than %d modules runs with torch's own kernels", _MOST_FORMS
            )
            return self._captured.module
        # A failure is written before it is posted to others, and they end this rank.
        with (
            self._agreement.compiling(f"compiles a graph of {len(self._captured.module.graph.nodes)} nodes"),
            self._request.failures_of(self._captured, inputs).compiling(),
        ):
            program = self._compile(inputs)
        self._forms.append(_GraphForm(parameters, hooked, program))
        return program

    def _compile(self, inputs: Sequence[Any]) -> Any:
        self._planner.communicator.refuse_changed()
        with normal_tensors():
            return compile_graph(
                self._captured,
                inputs,
                backend=self._request.backend,
                options=self._request.options,
                planner=self._planner,
            )
