"""Code generation knows static sizes only: a partitioned graph is bound to each combination of sizes that comes.

The graph was captured, traced and partitioned once, with its sizes open. What is made for each combination, on demand,
is a copy with integers in the place of symbols, and its programs. Backends that take open sizes do not need this.

Floats take ever new values, as a learning rate does: programs get them as tensors of one element (see
``autograd/rewrites/numbers_to_tensors.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core import config
from gradsplit.compile_core.capture import normal_tensors
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.graphs import (
    GraphSignature,
    PartitionedGraph,
    ResultAlias,
    resolve_sizes,
    resolve_spec,
)
from gradsplit.compile_core.ir.numbers import expression_of, has_backed_symbols, is_number, symbol_places
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module

logger = logging.getLogger(__name__)


class Programs(Protocol):
    """What a partitioned graph without open sizes was compiled to."""

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]: ...


CompilePrograms = Callable[[PartitionedGraph, Sequence[Any]], Programs]


class GraphOfManySizes:
    """A partitioned graph with open sizes; called with its inputs, it runs what was compiled for their sizes.

    There are at most ``config.cache_size_limit`` compiled forms.

    Args:
        partitioned: the graph.
        compile_programs: compiles a graph whose sizes are static, for its real inputs; it may have floats still, which
            the result takes as tensors.
        fallback: the captured graph, which runs with torch's own kernels where there are too many sizes.
        must_compile: drop the sizes not seen for longest instead.
    """

    def __init__(
        self,
        partitioned: PartitionedGraph,
        compile_programs: CompilePrograms,
        fallback: Callable[..., Any],
        must_compile: bool,
    ) -> None:
        self.partitioned = partitioned
        self._compile_programs = compile_programs
        self._fallback = fallback
        self._must_compile = must_compile
        self._compiled: OrderedDict[tuple[Any, ...], Programs] = OrderedDict()
        examples = [node.meta["val"] for node in graph_inputs(partitioned.forward)]
        self._places = symbol_places(examples)
        self._floats = {k for k, example in enumerate(examples) if isinstance(example, torch.SymFloat)}
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
        return tuple(place.value(inputs) for place in self._places.values()) in self._compiled

    def compiled_for(self, inputs: Sequence[Any]) -> Programs | None:
        """What is compiled for the sizes of these inputs; None where torch's own kernels must run them."""
        sizes = tuple(place.value(inputs) for place in self._places.values())
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
        if not self._floats and not self._integers:
            return inputs
        return [
            torch.scalar_tensor(given, dtype=torch.float64) if position in self._floats else given
            for position, given in enumerate(inputs)
            if position not in self._integers
        ]

    def _report_limit(self) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            logger.warning(
                "a graph was compiled for %d different sizes (the limit); further ones run with torch's own kernels",
                len(self._compiled),
            )


def has_numbers(graph: PartitionedGraph) -> bool:
    """Whether there is anything to bind: a size of an input that is open, or a number in the graph."""
    return any(
        is_number(node) or getattr(node.meta.get("val"), "_has_symbolic_sizes_strides", False)
        for node in graph.forward.graph.nodes
    )


def bind_sizes(graph: PartitionedGraph, inputs: Sequence[Any]) -> PartitionedGraph:
    """The graph for the sizes of these inputs.

    It takes the same inputs without the integers among them.

    Raises:
        Unsupported: a size depends on what no input determines.
    """
    examples = [node.meta["val"] for node in graph_inputs(graph.forward)]
    binding = _Binding(
        {symbol: sympy.Integer(place.value(inputs)) for symbol, place in symbol_places(examples).items()}
    )
    numbers: dict[str, Any] = {
        node.name: given
        for node, given in zip(graph_inputs(graph.forward), inputs, strict=True)
        if isinstance(node.meta["val"], torch.SymInt)
    }
    kept = [k for k, node in enumerate(graph_inputs(graph.forward)) if node.name not in numbers]
    forward, numbers = binding.of_module(graph.forward, numbers)
    backward = None
    if graph.backward is not None:
        saved_numbers = {name: numbers[name] for name in graph.saved if name in numbers}
        backward, _ = binding.of_module(graph.backward, saved_numbers)
    saved = tuple(name for name in graph.saved if name not in numbers)
    results = graph_results(graph.forward)
    ends = graph.num_outputs - graph.signature.open_sizes
    sizes = [numbers[node.name] for node in results[ends : graph.num_outputs] if node is not None]
    primals = {node.name for node in graph_inputs(forward)}
    return PartitionedGraph(
        forward=forward,
        backward=backward,
        num_outputs=ends,
        saved=saved,
        saved_bytes=_saved_bytes(forward, [name for name in saved if name not in primals]),
        signature=_bind_signature(graph.signature, sizes, {old: new for new, old in enumerate(kept)}),
        unnoticed=graph.unnoticed,
    )


class _Binding:
    """Integers for the symbols of a graph."""

    def __init__(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        self._values = values
        self._known: dict[sympy.Expr, int] = {}

    def of_module(
        self, module: GraphModule, numbers: Mapping[str, Any]
    ) -> tuple[GraphModule, dict[str, Any]]:
        """The module with constants for its numbers, and these by the names of their nodes.

        Args:
            numbers: those that it takes no longer, by name of the placeholder.
        """
        graph = Graph()
        made: dict[Node, Any] = {}
        known = dict(numbers)
        for node in module.graph.nodes:
            if is_number(node) and self._is_bound(node, made, known):
                known[node.name] = made[node] = self._of_number(node, made, known)
                continue
            if node.op == "output":
                results = [result for result in node.args[0] if result is None or result.name not in known]
                graph.output(tuple(None if result is None else made[result] for result in results))
                continue
            made[node] = graph.node_copy(node, made.__getitem__)
            if "val" in node.meta:
                made[node].meta["val"] = self._of_value(node.meta["val"])
        return lazy_module(module, graph), known

    def _is_bound(self, node: Node, made: Mapping[Node, Any], known: Mapping[str, Any]) -> bool:
        """Whether sizes determine a number; else floats do that come with each run, or a tensor's data."""
        if node.name in known:
            return True
        number = node.meta["val"]
        if isinstance(number, torch.SymInt) and has_backed_symbols(number):
            return True
        reads = node.all_input_nodes
        return node.op != "placeholder" and all(
            is_number(read) and not isinstance(made[read], Node) for read in reads
        )

    def _of_number(self, node: Node, made: Mapping[Node, Any], known: Mapping[str, Any]) -> Any:
        if node.name in known:
            return known[node.name]
        number = node.meta["val"]
        if isinstance(number, torch.SymInt):
            return self._of_size(number)
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: made[read])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _of_size(self, number: Any) -> int:
        if not isinstance(number, torch.SymInt):
            return number
        expression = expression_of(number)
        found = self._known.get(expression)
        if found is None:
            value: Any = expression.xreplace(dict(self._values))
            if not value.is_number:
                raise Unsupported("open-size", f"no input determines the size {expression}")
            found = self._known[expression] = int(value)
        return found

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._of_value, value))
        if not isinstance(value, torch.Tensor) or not value._has_symbolic_sizes_strides:
            return value
        shape, stride = (tuple(map(self._of_size, numbers)) for numbers in (value.shape, value.stride()))
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


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
