"""The prints of graphs and schedules."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.ir.print_graph import print_graph, print_schedule
from gradsplit.compile_core.ir.regions import build_region, whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule


def traced() -> torch.fx.GraphModule:
    return make_fx(lambda x: (x.mul(2.0).sum([0], keepdim=True), None))(torch.ones(2, 3))


def test_graph():
    assert print_graph(traced()).splitlines() == [
        "input x_1: float32[2, 3] cpu",
        "mul: float32[2, 3] cpu = mul.Tensor(x_1, 2.0)",
        "sum_1: float32[1, 3] cpu = sum.dim_IntList(mul, [0], True)",
        "return (sum_1, None)",
    ]


def test_graph_of_functions_and_methods():
    printed = print_graph(torch.fx.symbolic_trace(lambda x: (torch.relu(x).view(2, 3), x)))
    assert printed.splitlines() == [
        "input x",
        "relu = relu(x)",
        "view = view(relu, 2, 3)",
        "return (view, x)",
    ]


def test_schedule_of_one_region():
    printed = print_schedule(whole_schedule("forward", traced()))
    assert printed.splitlines()[:2] == ["schedule forward(x_1)", "compute forward(x_1) -> sum_1"]
    assert printed.splitlines()[-1] == "return sum_1, None"


def test_schedule_with_destinations():
    module = traced()
    (mul,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    region = build_region("backward_0", module, [mul], [], {"weight": mul})
    schedule = Schedule("backward", ("x_1",), (region,), (None,))
    assert print_schedule(schedule).splitlines() == [
        "schedule backward(x_1)",
        "compute backward_0(x_1) -> weight.stored",
        "    store weight.stored in weight",
        "    input x_1: float32[2, 3] cpu",
        "    mul: float32[2, 3] cpu = mul.Tensor(x_1, 2.0)",
        "    return (mul,)",
        "return None",
    ]
