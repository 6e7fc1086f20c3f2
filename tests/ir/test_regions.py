"""Regions built from parts of a graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.ir.regions import build_region, graph_inputs, graph_results, whole_schedule


def traced(function, *inputs: torch.Tensor) -> GraphModule:
    return make_fx(function)(*inputs)


def example() -> GraphModule:
    def function(x, y):
        product = torch.mul(x, y)
        total = torch.add(product, x)
        return (torch.sin(total), product)

    return traced(function, torch.ones(2), torch.ones(2))


def nodes_of(module: GraphModule) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in module.graph.nodes}


def test_inputs_and_results():
    module = example()
    assert [node.name for node in graph_inputs(module)] == ["x_1", "y_1"]
    assert [node.name for node in graph_results(module) if node is not None] == ["sin", "mul"]


def test_region_reads_what_it_does_not_compute():
    module = example()
    nodes = nodes_of(module)
    region = build_region("part", module, [nodes["add"], nodes["sin"]], [nodes["sin"]])
    assert (region.inputs, region.outputs) == (("x_1", "mul"), ("sin",))
    (result,) = region.module(torch.full((2,), 2.0), torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3.0).sin())


def test_destinations_come_behind_the_results_and_are_scaled():
    module = example()
    nodes = nodes_of(module)
    region = build_region(
        "part", module, [nodes["mul"]], [nodes["mul"]], {"a": nodes["mul"], "b": nodes["x_1"]}, factor=0.5
    )
    assert region.outputs == ("mul", "a.stored", "b.stored")
    assert region.destinations == {"a.stored": "a", "b.stored": "b"}
    arguments = {"x_1": torch.ones(2), "y_1": torch.full((2,), 4.0)}
    results = region.module(*(arguments[name] for name in region.inputs))
    assert [result[0].item() for result in results] == [4.0, 2.0, 0.5]


def test_region_keeps_what_is_known_of_values():
    module = example()
    (region,) = whole_schedule("forward", module).computes
    assert all("val" in node.meta for node in region.module.graph.nodes if node.op != "output")


def test_constants_are_shared():
    constant = torch.full((2,), 3.0)
    module = traced(lambda x: (x * constant,), torch.ones(2))
    (region,) = whole_schedule("forward", module).computes
    assert torch.equal(region.module(torch.ones(2))[0], constant)


def test_schedule_of_one_region():
    schedule = whole_schedule("forward", example())
    assert schedule.inputs == ("x_1", "y_1")
    assert schedule.outputs == ("sin", "mul")
    assert [step.name for step in schedule.computes] == ["forward"]


def test_results_that_are_inputs_absent_or_named_twice():
    module = symbolic_trace(lambda x, y: (x, None, x + y))
    module.graph.output_node().args = ((*graph_results(module), graph_results(module)[2]),)
    schedule = whole_schedule("forward", module)
    assert schedule.outputs == ("x", None, "add", "add")
    (region,) = schedule.computes
    assert region.outputs == ("add",)
