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

from compile_core import config
from compile_core.capture.fake_inputs import make_fake
from compile_core.capture.global_state import normal_tensors
from compile_core.ir.captured import CapturedGraph

logger = logging.getLogger(__name__)

# For how many values of the floats that a graph takes it is compiled. Compiled programs have numbers built in, so
# beyond these few the graph itself computes with the float that comes.
_MOST_FLOATS = 4

CompiledGraph = Callable[..., Sequence[torch.Tensor]]
CompileGraph = Callable[[CapturedGraph, list[torch.Tensor]], CompiledGraph]


def compile_per_sizes(compile_graph: CompileGraph, *, must_compile: bool = False) -> CompileGraph:
    """What compiles graphs with open sizes, given what compiles those without.

    Args:
        compile_graph: compiles a graph whose sizes are static, for its real inputs.
        must_compile: see ``GraphOfManySizes``.
    """

    def compile_any(captured: CapturedGraph, inputs: list[Any]) -> CompiledGraph:
        if not captured.has_open_sizes:
            return compile_graph(captured, inputs)
        graph = GraphOfManySizes(captured, compile_graph, must_compile)
        graph.compiled_for(inputs)
        return graph

    return compile_any


class GraphOfManySizes:
    """A captured graph with open sizes; called with its inputs, it runs what was compiled for their sizes.

    There are at most ``config.cache_size_limit`` compiled forms, and for a few values of floats only.

    Args:
        captured: the graph.
        compile_graph: compiles a graph whose sizes are static, for its real inputs.
        must_compile: drop the sizes not seen for longest when there are too many, instead of running all further ones
            with torch's own kernels.
    """

    def __init__(self, captured: CapturedGraph, compile_graph: CompileGraph, must_compile: bool) -> None:
        self._captured = captured
        self._compile_graph = compile_graph
        self._must_compile = must_compile
        self._compiled: OrderedDict[tuple[Any, ...], CompiledGraph] = OrderedDict()
        self._open = [index for index, entry in enumerate(captured.inputs) if entry.is_open]
        self._lock = threading.RLock()
        self._limit_reported = False
        # A float, unlike a size, takes ever new values, as a learning rate does.
        self._floats: set[tuple[str, ...]] = set()

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        compiled = self.compiled_for(inputs)
        if compiled is None:
            return self._captured.module(*inputs)
        return compiled(*(item for item in inputs if isinstance(item, torch.Tensor)))

    def compiled_for(self, inputs: Sequence[Any]) -> CompiledGraph | None:
        """What is compiled for the sizes of these inputs; None where torch's own kernels must run them."""
        sizes = tuple(_sizes_of(inputs[index]) for index in self._open)
        with self._lock:
            found = self._compiled.get(sizes)
            if found is not None:
                self._compiled.move_to_end(sizes)
                return found
            floats = tuple(size for size in sizes if isinstance(size, str))
            if floats not in self._floats and len(self._floats) >= _MOST_FLOATS:
                self._report_limit(f"{_MOST_FLOATS} different values of floats")
                return None
            if len(self._compiled) >= config.cache_size_limit:
                if not self._must_compile:
                    self._report_limit(f"{len(self._compiled)} different sizes")
                    return None
                self._compiled.popitem(last=False)
            tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
            with normal_tensors():
                found = self._compile_graph(bind_sizes(self._captured, inputs), tensors)
            self._compiled[sizes] = found
            self._floats.add(floats)
            return found

    def _report_limit(self, what: str) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            logger.warning(
                "a graph was compiled for %s (the limit); further ones run with torch's own kernels", what
            )


def _sizes_of(value: Any) -> Any:
    """What a tensor or a number contributes to the key: of floats the text, which tells 0.0 from -0.0."""
    if isinstance(value, float):
        return repr(value)
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def bind_sizes(captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
    """The graph for the sizes of these inputs. It takes the tensors among them; numbers are constants in it.

    Example values are new for the inputs; those of other nodes have the open sizes still.
    """
    mode = FakeTensorMode()
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    entries = []
    given = iter(zip(captured.inputs, inputs, strict=True))
    for node in captured.module.graph.nodes:
        if node.op != "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
            continue
        entry, value = next(given)
        if isinstance(value, torch.Tensor):
            copy = made[node] = graph.node_copy(node)
            copy.meta["example_value"] = make_fake(mode, value, None)
            entries.append(replace(entry, name=copy.name, example=copy.meta["example_value"]))
        else:
            made[node] = value
    module = fx.GraphModule(captured.module, graph, type(captured.module).__name__)
    return CapturedGraph(module, tuple(entries))
