"""Bodies: Python functions that are captured into graphs of their own, as arguments of higher-order calls.

A body is interpreted like any inlined call, but its operations go into a graph that the outer graph holds as an
attribute. Tensors of the outer graph that it reads become further inputs of it ("lifted"). What it may not do is change
anything outside of itself: how often and when a higher-order call runs its function is the call's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from gradsplit.compile_core.capture.graph.data_sizes import DataSizes
from gradsplit.compile_core.capture.graph.output_graph import OutputGraph
from gradsplit.compile_core.capture.object_model.partials import PartialValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.structures import map_parts
from gradsplit.compile_core.capture.values.tensors import TensorValue, refuse_unseen, without_attributes
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import InputKind
from gradsplit.compile_core.ir.sources import Source
from gradsplit.compile_core.torch_facts.torch_switches import read_switches


class BodyGraph(OutputGraph):
    """The graph of a body inside ``outer``. ``lifted`` are the outer nodes that it reads, with its placeholders."""

    def __init__(self, outer: OutputGraph) -> None:
        super().__init__(outer.sizes, outer.data_reads)
        self.outer, self.is_body = outer, True
        self.node_of_source = outer.node_of_source
        self.data_sizes = DataSizes(outer.data_sizes)
        self.lifted: dict[fx.Node, fx.Node] = {}

    def add_input(self, real: torch.Tensor, source: Source, kind: InputKind, *sizes: Any) -> fx.Node:
        """Tensors that exist are inputs of the outermost graph."""
        return self.outer.add_input(real, source, kind, *sizes)

    def add_number_input(self, source: Source, symbol: sympy.Symbol) -> fx.Node:
        """What a body reads from outside are tensors; an integer is the one of this call."""
        int(self.sizes.number(symbol))
        raise NotImplementedError(f"{source} as an input of a body")

    def float_input(self, source: Source, real: float, settle: Callable[[], float]) -> fx.Node:
        raise NotImplementedError(f"{source} as an input of a body")

    def own_node(self, node: fx.Node) -> fx.Node:
        if node.graph is self.graph:
            return node
        outside = self.outer.own_node(node)
        if outside not in self.lifted:
            self.lifted[outside] = self.add_placeholder(outside.name, outside.meta["example_value"])
        return self.lifted[outside]

    def close(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """The body as a module: its inputs are the placeholders in order, its result is a flat tuple."""
        self.graph.output(tuple(self.own_node(node) for node in results))
        return self.make_module("Body")


@dataclass(frozen=True)
class Body:
    """A captured body.

    Attributes:
        module: called with ``arguments`` new tensors and then the lifted ones; returns a flat tuple of tensors.
        lifted: the tensors of the outer graph that it reads, as nodes of that graph.
        result: what the function returned, with tensors of the body in it.
        tensors: the tensors of the result, in the order of the module's tuple.
    """

    module: fx.GraphModule
    lifted: tuple[fx.Node, ...]
    result: Value
    tensors: tuple[TensorValue, ...]


def _modes(state: CaptureState) -> Any:
    counts = [len(modes) for modes in (state.open_modes, state.entered_modes, state.function_modes)]
    return torch.is_grad_enabled(), read_switches(), counts


@contextmanager
def body_graph(state: CaptureState) -> Iterator[BodyGraph]:
    """Operations go into a new graph inside the present one; nothing outside may change."""
    refuse_unseen(state, "a function that becomes a graph")
    outer = state.graph
    before = _modes(state)
    state.graph = BodyGraph(outer)
    try:
        with state.effects.only_own_values():
            yield state.graph
        if _modes(state) != before:
            raise state.unsupported(
                "mode-in-body", "a function that becomes a graph leaves a mode of torch changed"
            )
    except Unsupported as error:
        if error.location is None:
            raise state.unsupported(error.reason_id, error.explanation, error.hint) from error
        raise
    finally:
        state.graph = outer


def body_argument(
    state: CaptureState, graph: BodyGraph, outside: TensorValue, fake: torch.Tensor
) -> TensorValue:
    """A tensor that the body gets for one of the outer graph: a new input, with metadata of its own."""
    without_attributes(state, [outside])
    value = TensorValue(graph.add_placeholder(outside.node.name, fake), fake, torch.Tensor)
    state.tensor_of_fake[id(fake)] = value
    return value


def capture_body(
    state: CaptureState,
    function: Value,
    args: list[Value],
    kwargs: dict[str, Value] | None = None,
    first: Sequence[fx.Node] = (),
) -> Body:
    """Capture a call of ``function`` as a body. The nodes in ``first`` are lifted before any other, in their order."""
    with body_graph(state) as graph:
        for node in first:
            graph.own_node(node)
        result = function.call(state, args, kwargs or {})
        tensors = tensors_of(state, result)
        module = graph.close([tensor.node for tensor in tensors])
        return Body(module, tuple(graph.lifted), result, tuple(tensors))


def map_tensors(state: CaptureState, value: Value, change: Callable[[TensorValue], Value]) -> Value:
    """A copy of a value made of tensors, constants, tuples, lists and dictionaries, with other tensors."""

    def part(value: Value) -> Value:
        if isinstance(value, TensorValue):
            return change(value)
        if isinstance(value, ConstantValue):
            return value
        raise state.unsupported(
            "value-in-body",
            f"{value.describe()} goes into or comes out of a function that becomes a graph of its own",
        )

    return map_parts(state, value, part)


def tensors_of(state: CaptureState, value: Value) -> list[TensorValue]:
    """The tensors in a value, each once."""
    found: dict[int, TensorValue] = {}

    def note(tensor: TensorValue) -> Value:
        without_attributes(state, [tensor])
        found[id(tensor)] = tensor
        return tensor

    map_tensors(state, value, note)
    return list(found.values())


def call_with_bodies(
    state: CaptureState,
    target: Callable[..., Any],
    nodes: Sequence[Any],
    body: Body,
    example_by: Callable[..., Any] | None = None,
) -> Value:
    """Record ``target(*nodes)``, which returns the flat tuple of ``body``, and give that the body's structure."""
    returned = state.call_tensor_nodes(target, nodes, example_by)
    results = dict(zip(map(id, body.tensors), state.items_of(returned), strict=True))
    return map_tensors(state, body.result, lambda tensor: results[id(tensor)])


def real_object(state: CaptureState, value: Value) -> Any:
    """The very object that a value stands for, guarded to be the same at every call; raises NotConstant for others."""
    if isinstance(value, PartialValue):
        args = [real_object(state, item) for item in value.args.all(state)]
        kwargs = {key: real_object(state, item) for key, item in value.kwargs.held(state).items()}
        return functools.partial(real_object(state, value.function), *args, **kwargs)
    if isinstance(value, SequenceValue) and value.cls in (list, tuple):
        return value.cls(real_object(state, item) for item in value.all(state))
    real = getattr(value, "real", None)
    if real is None:
        return value.as_constant()
    if value.source is not None:
        state.guards.is_object(value.source, real)
    return real
