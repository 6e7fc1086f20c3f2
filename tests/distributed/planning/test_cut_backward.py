"""The backward cut into segments: every value computed once, gradients complete when they are said to be, equal
gradients."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.distributed.planning.cut_backward import Segment, cut_backward
from tests.autograd.compare_with_eager import backward, compile_program, partitioned_graph
from tests.runtime.silent_communicator import SilentCommunicator

NAMES = ["w1", "b1", "w2", "b2"]


def program(x, w1, b1, w2, b2):
    hidden = F.layer_norm(F.linear(x, w1, b1), (6,)).relu()
    return F.linear(hidden, w2, b2)


def inputs() -> list[torch.Tensor]:
    shapes = [(3, 4), (6, 4), (6,), (2, 6), (2,)]
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def cut_behind(
    module: GraphModule, gradients: Mapping[str, int], names: Sequence[Sequence[str]]
) -> list[Segment]:
    """The graph in its order, cut behind the last gradient of each group, and what is behind the last."""
    order = list(module.graph.nodes)
    results = graph_results(module)
    segments = []
    begin = 0
    for group in [*names, []]:
        places = [
            order.index(result) + 1 for name in group if (result := results[gradients[name]]) is not None
        ]
        end = max([begin, *places]) if group else len(order)
        nodes = tuple(node for node in order[begin:end] if node.op == "call_function")
        if nodes or group:
            segments.append(Segment(nodes, tuple(group)))
        begin = end
    return segments


class FakeCommunicator(SilentCommunicator):
    """Places of one process; notes what happens in which order."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.places = {name: torch.full(tensor.shape, torch.nan) for name, tensor in tensors.items()}
        self.events: list[str] = []

    def expect(self, node: object, names: Sequence[str]) -> None:
        self.events.append("expect")

    def destinations(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [self.places[name] for name in names]

    def begin(self, node: object, undefined: Mapping[str, Collection[int]]) -> FakeCommunicator:
        self.events.append(" ".join(["begin", *undefined]))
        return self

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        self.events.append(" ".join(names))


class FakePlanner:
    """Cuts into the given segments; the parameters are the inputs after ``num_data``."""

    def __init__(self, segments: Sequence[Sequence[str]], num_data: int = 1, factor: float = 1.0) -> None:
        self.segments, self.num_data, self.factor = segments, num_data, factor
        self.strides: dict[str, tuple[int, ...]] = {}
        self.schedule: Schedule | None = None
        self.in_flight = 1

    def backward_program(self, graph: PartitionedGraph, forward: Any, backward: Any) -> Any:
        del graph, forward
        return backward

    def compiling(self, what: str) -> Any:
        del what
        return nullcontext()

    def plan_backward(
        self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]
    ) -> tuple[Schedule, FakeCommunicator]:
        assert graph.backward is not None
        names = [name for segment in self.segments for name in segment]
        ordered = sorted(names, key=NAMES.index)
        tensors = dict(zip(ordered, inputs[self.num_data :], strict=True))
        places = {k: position for position, k in enumerate(graph.signature.gradient_inputs)}
        gradients = {name: places[self.num_data + k] for k, name in enumerate(ordered)}
        self.communicator = FakeCommunicator(tensors)
        segments = cut_behind(graph.backward, gradients, self.segments)
        self.schedule = cut_backward(graph.backward, gradients, segments, self.factor, self.strides)
        return self.schedule, self.communicator


@pytest.mark.parametrize(
    "segments",
    [[NAMES], [["w2", "b2"], ["w1", "b1"]], [["b2"], ["w2"], ["b1"], ["w1"]], [["w1"], ["w2", "b2", "b1"]]],
)
def test_gradients_are_eagers(segments):
    tensors = inputs()
    planner = FakePlanner(segments)
    compiled = compile_program(program, tensors, planner)
    backward(compiled(*tensors))
    x_gradient = tensors[0].grad
    assert all(parameter.grad is None for parameter in tensors[1:])

    tensors[0].grad = None
    backward([program(*tensors)])
    torch.testing.assert_close(x_gradient, tensors[0].grad)
    for name, parameter in zip(NAMES, tensors[1:], strict=True):
        torch.testing.assert_close(planner.communicator.places[name], parameter.grad)
    told = [" ".join(names) for names in segments]
    assert planner.communicator.events == ["expect", "begin", *told]


def test_factor_scales_what_goes_into_buckets_only():
    tensors = inputs()
    planner = FakePlanner([["w2", "b2"], ["w1", "b1"]], factor=0.25)
    backward(compile_program(program, tensors, planner)(*tensors))
    x_gradient = tensors[0].grad
    tensors[0].grad = None
    backward([program(*tensors)])
    torch.testing.assert_close(x_gradient, tensors[0].grad)
    torch.testing.assert_close(planner.communicator.places["w1"], tensors[1].grad / 4)


def cut(segments: Sequence[Sequence[str]]) -> tuple[PartitionedGraph, Schedule]:
    tensors = inputs()
    graph = partitioned_graph(program, *tensors)
    schedule, _ = FakePlanner(segments).plan_backward(graph, tensors)
    return graph, schedule


def test_every_value_is_computed_once():
    graph, schedule = cut([["w2", "b2"], ["w1", "b1"]])
    computed = [
        node for step in schedule.computes for node in step.module.graph.nodes if node.op == "call_function"
    ]
    assert graph.backward is not None
    original = [node for node in graph.backward.graph.nodes if node.op == "call_function"]
    assert sorted(str(node.target) for node in computed) == sorted(str(node.target) for node in original)


def test_regions_read_only_what_is_known_and_pass_on_tensors_only():
    _, schedule = cut([["b2"], ["w2"], ["b1"], ["w1"]])
    known = set(schedule.inputs)
    for step in schedule.computes:
        assert known.issuperset(step.inputs)
        assert known.isdisjoint(step.outputs)
        known.update(step.outputs)
        results = graph_results(step.module)
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in results if node is not None)
        assert not any(
            node.target is operator.getitem and node.args[0].op == "placeholder"
            for node in step.module.graph.nodes
        )
    assert known.issuperset(name for name in schedule.outputs if name is not None)


def test_first_segment_computes_nothing_of_the_first_layer():
    _, schedule = cut([["w2", "b2"], ["w1", "b1"]])
    first = schedule.computes[0]
    assert not any("layer_norm" in node.name for node in first.module.graph.nodes)


def test_each_region_stores_the_gradients_of_its_segment():
    _, schedule = cut([["w2", "b2"], ["w1", "b1"]])
    assert [tuple(step.destinations.values()) for step in schedule.computes] == [("w2", "b2"), ("w1", "b1")]


def test_input_and_parameter_with_the_same_gradient():
    """Both terms of a sum have the sum's gradient; the input's is returned, the parameter's is stored."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    planner = FakePlanner([["w1"]])
    backward(compile_program(lambda x, w: x + w, [x, w], planner)(x, w))
    assert x.grad is not None
    assert torch.equal(planner.communicator.places["w1"], x.grad)


def test_parameter_named_like_a_node():
    """Names of parameters and of values live apart."""
    tensors = inputs()
    graph = partitioned_graph(program, *tensors)
    assert graph.backward is not None
    name = next(node.name for node in graph.backward.graph.nodes if node.op == "call_function")
    segments = cut_behind(graph.backward, {name: 1}, [[name]])
    schedule = cut_backward(graph.backward, {name: 1}, segments, 1.0, {})
    outputs = [output for step in schedule.computes for output in step.outputs]
    assert len(set(outputs)) == len(outputs)
