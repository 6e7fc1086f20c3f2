"""A graph as a whole for each combination of sizes, as CUDA graphs need it: what these record has its sizes for good.

Elsewhere each region has programs for many sizes; see ``region_of_many_sizes``.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from gradsplit.compile_core import config
from gradsplit.compile_core.autograd.rewrites.numbers_to_tensors import as_tensors
from gradsplit.compile_core.capture import normal_tensors
from gradsplit.compile_core.ir.graphs import (
    GraphSignature,
    PartitionedGraph,
    ResultAlias,
    resolve_sizes,
    resolve_spec,
)
from gradsplit.compile_core.ir.numbers import SizeReader
from gradsplit.compile_core.ir.open_graphs import OpenGraph, SizeValues
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results

logger = logging.getLogger(__name__)


class StaticPrograms(Protocol):
    """What a partitioned graph without open sizes was compiled to."""

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]: ...


CompilePrograms = Callable[[PartitionedGraph, Sequence[Any]], StaticPrograms]


class GraphOfManySizes:
    """A partitioned graph with open sizes; called with its inputs, it runs what was compiled for their sizes.

    There are at most ``config.cache_size_limit`` compiled forms.

    Args:
        partitioned: the graph; its only numbers are sizes.
        compile_programs: compiles a graph whose sizes are static, for its real inputs.
        floats: positions of the inputs that programs get as tensors of one element.
        fallback: the captured graph, which runs with torch's own kernels where there are too many sizes.
        must_compile: drop the sizes not seen for longest instead.
    """

    def __init__(
        self,
        partitioned: PartitionedGraph,
        compile_programs: CompilePrograms,
        floats: frozenset[int],
        fallback: Callable[..., Any],
        must_compile: bool,
    ) -> None:
        self.partitioned = partitioned
        self._compile_programs = compile_programs
        self._floats = floats
        self._fallback = fallback
        self._must_compile = must_compile
        self._compiled: OrderedDict[tuple[Any, ...], StaticPrograms] = OrderedDict()
        examples = [node.meta["val"] for node in graph_inputs(partitioned.forward)]
        self._reader = SizeReader(examples)
        self._integers = {k for k, example in enumerate(examples) if isinstance(example, torch.SymInt)}
        self._lock = threading.RLock()
        self._limit_reported = False

    @property
    def programs(self) -> tuple[Any, ...]:
        """What was compiled, for the sizes not seen for longest first."""
        return tuple(self._compiled.values())

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        compiled = self.compiled_for(inputs)
        if compiled is None:
            return self._fallback(*inputs)
        return compiled(*self._passed(inputs))

    def is_compiled_for(self, inputs: Sequence[Any]) -> bool:
        """Whether nothing needs to be compiled for the sizes of these inputs."""
        return self._reader.values(inputs) in self._compiled

    def compiled_for(self, inputs: Sequence[Any]) -> StaticPrograms | None:
        """What is compiled for the sizes of these inputs; None where torch's own kernels must run them."""
        sizes = self._reader.values(inputs)
        with self._lock:
            found = self._compiled.get(sizes)
            if found is not None:
                self._compiled.move_to_end(sizes)
                return found
            if len(self._compiled) >= config.cache_size_limit:
                if not self._must_compile:
                    self._report_limit()
                    return None
                self._compiled.popitem(last=False)
            with normal_tensors():
                bound = bind_sizes(self.partitioned, inputs)
                found = self._compile_programs(bound, self._passed(inputs))
            self._compiled[sizes] = found
            return found

    def _passed(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What programs get: no integers, which they have built in, and tensors for floats."""
        if self._floats:
            inputs = as_tensors(inputs, self._floats)
        return [given for position, given in enumerate(inputs) if position not in self._integers]

    def _report_limit(self) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            logger.warning(
                "a graph was compiled for %d different sizes (the limit); further ones run with torch's own kernels",
                len(self._compiled),
            )


def bind_sizes(graph: PartitionedGraph, inputs: Sequence[Any]) -> PartitionedGraph:
    """The graph for the sizes of these inputs.

    It takes the same inputs without the integers among them.

    Raises:
        Unsupported: a size depends on what no input determines.
    """
    placeholders = graph_inputs(graph.forward)
    reader = SizeReader([node.meta["val"] for node in placeholders])
    sizes = dict(zip(reader.symbols, reader.values(inputs), strict=True))
    numbers: dict[str, Any] = {
        node.name: given
        for node, given in zip(placeholders, inputs, strict=True)
        if isinstance(node.meta["val"], torch.SymInt)
    }
    kept = [k for k, node in enumerate(placeholders) if node.name not in numbers]
    forward, numbers = OpenGraph.of(graph.forward).bind(graph.forward, SizeValues(sizes, numbers))
    backward = None
    if graph.backward is not None:
        saved_numbers = {name: numbers[name] for name in graph.saved if name in numbers}
        backward, _ = OpenGraph.of(graph.backward).bind(graph.backward, SizeValues(sizes, saved_numbers))
    saved = tuple(name for name in graph.saved if name not in numbers)
    results = graph_results(graph.forward)
    ends = graph.num_outputs - graph.signature.open_sizes
    returned = [numbers[node.name] for node in results[ends : graph.num_outputs] if node is not None]
    primals = {node.name for node in graph_inputs(forward)}
    return PartitionedGraph(
        forward=forward,
        backward=backward,
        num_outputs=ends,
        saved=saved,
        saved_bytes=_saved_bytes(forward, [name for name in saved if name not in primals]),
        signature=_bind_signature(graph.signature, returned, {old: new for new, old in enumerate(kept)}),
        unnoticed=graph.unnoticed,
    )


def _saved_bytes(forward: GraphModule, computed: Sequence[str]) -> int:
    nodes = {node.name: node for node in forward.graph.nodes}
    values = [nodes[name].meta["val"] for name in computed]
    return sum(value.numel() * value.dtype.itemsize for value in values if isinstance(value, torch.Tensor))


def _bind_signature(
    signature: GraphSignature, sizes: Sequence[int], positions: Mapping[int, int]
) -> GraphSignature:
    """The signature without open sizes; ``positions`` has the new ones of the inputs that are left."""

    def of_result(result: int | ResultAlias) -> int | ResultAlias:
        if isinstance(result, int):
            return result
        if result.of_input:
            result = replace(result, position=positions[result.position])
        if result.view is None:
            return result
        size, stride, offset = result.view
        view = (resolve_sizes(size, sizes), resolve_sizes(stride, sizes), *resolve_sizes([offset], sizes))
        return replace(result, view=view)

    return replace(
        signature,
        results=tuple(map(of_result, signature.results)),
        mutated=tuple(replace(change, input=positions[change.input]) for change in signature.mutated),
        gradient_inputs=tuple(positions[position] for position in signature.gradient_inputs),
        tangent_specs=tuple(resolve_spec(spec, sizes) for spec in signature.tangent_specs),
        open_sizes=0,
    )
