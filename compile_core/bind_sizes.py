"""Stages 2 to 8 know static sizes only: a graph whose sizes are open is compiled for each combination that comes.

One captured entry then serves all sizes, and what lies below it is made on demand, at the first call with new sizes.
Backends that take whole graphs do not need this: they get the graph with its sizes open.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_core.capture.fake_inputs import make_fake
from compile_core.capture.global_state import normal_tensors
from compile_core.ir.captured import CapturedGraph, is_symbolic_number

logger = logging.getLogger(__name__)

CompiledGraph = Callable[..., Sequence[torch.Tensor]]
CompileGraph = Callable[[CapturedGraph, list[torch.Tensor]], CompiledGraph]

# Compiled graphs that one captured graph may have.
SIZES_LIMIT = 64


def compile_per_sizes(compile_graph: CompileGraph, *, must_compile: bool = False) -> CompileGraph:
    """What compiles graphs with open sizes, given what compiles those without.

    Args:
        compile_graph: compiles a graph whose sizes are static, for its real inputs.
        must_compile: drop the sizes not seen for longest when there are too many, instead of running all further ones
            with torch's own kernels.
    """

    def compile_any(captured: CapturedGraph, inputs: list[Any]) -> CompiledGraph:
        if not captured.has_open_sizes:
            return compile_graph(captured, inputs)
        graph = GraphOfManySizes(captured, compile_graph, must_compile)
        graph.compiled_for(inputs)
        return graph

    return compile_any


class GraphOfManySizes:
    """A captured graph with open sizes; called with its inputs, it runs what was compiled for their sizes."""

    def __init__(self, captured: CapturedGraph, compile_graph: CompileGraph, must_compile: bool) -> None:
        self._captured = captured
        self._compile_graph = compile_graph
        self._must_compile = must_compile
        self._compiled: OrderedDict[tuple[Any, ...], CompiledGraph] = OrderedDict()
        self._open = [index for index, entry in enumerate(captured.inputs) if entry.is_open]
        self._tensors = [
            index for index, entry in enumerate(captured.inputs) if not is_symbolic_number(entry.example)
        ]
        self._lock = threading.RLock()
        self._limit_reported = False

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        compiled = self.compiled_for(inputs)
        if compiled is None:
            return self._captured.module(*inputs)
        return compiled(*(inputs[index] for index in self._tensors))

    def compiled_for(self, inputs: Sequence[Any]) -> CompiledGraph | None:
        """What is compiled for the sizes of these inputs; None where torch's own kernels must run them."""
        sizes = tuple(_sizes_of(inputs[index]) for index in self._open)
        with self._lock:
            found = self._compiled.get(sizes)
            if found is not None:
                self._compiled.move_to_end(sizes)
                return found
            if len(self._compiled) >= SIZES_LIMIT:
                if not self._must_compile:
                    self._report_limit()
                    return None
                self._compiled.popitem(last=False)
            with normal_tensors():
                bound, tensors = bind_sizes(self._captured, inputs)
                found = self._compiled[sizes] = self._compile_graph(bound, tensors)
            return found

    def _report_limit(self) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            logger.warning(
                "a graph was compiled for %d different sizes (the limit); further sizes run with torch's own kernels",
                SIZES_LIMIT,
            )


def _sizes_of(value: Any) -> Any:
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def bind_sizes(captured: CapturedGraph, inputs: Sequence[Any]) -> tuple[CapturedGraph, list[torch.Tensor]]:
    """The graph for the sizes of these inputs: numbers are constants in it. Also the inputs that it takes, all tensors.

    Only the placeholders of the result have example values.
    """
    mode = FakeTensorMode()
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    real: dict[fx.Node, Any] = {}
    entries, tensors = [], []
    given = iter(zip(captured.inputs, inputs, strict=True))
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            entry, real[node] = next(given)
            if is_symbolic_number(entry.example):
                made[node] = real[node]
                continue
            copy = made[node] = graph.node_copy(node)
            copy.meta["example_value"] = make_fake(mode, real[node], None)
            entries.append(replace(entry, name=copy.name, example=copy.meta["example_value"]))
            tensors.append(real[node])
        elif is_symbolic_number(node.meta.get("example_value")):
            made[node] = real[node] = _compute(node, real)
        else:
            copy = made[node] = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, made.__getitem__),
                fx.map_arg(node.kwargs, made.__getitem__),
                node.name,
            )
            copy.meta["stack_trace"] = node.meta.get("stack_trace", "")
    module = fx.GraphModule(captured.module, graph, "CapturedGraph")
    return CapturedGraph(module, tuple(entries)), tensors


def _compute(node: fx.Node, real: dict[fx.Node, Any]) -> Any:
    """The number that a node gives; its operands are numbers and input tensors."""
    arguments = fx.map_arg(node.args, real.__getitem__)
    if node.op == "call_method":
        return getattr(arguments[0], str(node.target))(*arguments[1:])
    assert callable(node.target)
    return node.target(*arguments)
