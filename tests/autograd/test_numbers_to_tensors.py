"""Floats that a graph takes or reads out of tensors, as tensors that kernels read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.numbers_to_tensors import numbers_to_tensors
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.print_graph import print_graph
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.observe.stage_times import Stopwatch

VALUES = (0.5, 2.0, -1.5, float("nan"), -0.0, float("inf"), 1e-40)

# Each takes a tensor and a float; results in the dtype that eager gives.
FUNCTIONS: list[Callable[[torch.Tensor, float], Any]] = [
    lambda x, a: (x * a, a - x, x / a),
    lambda x, a: torch.add(x, x, alpha=a),
    lambda x, a: (x > a).to(x.dtype) + x,
    lambda x, a: torch.where(x > 0, x, a),
    lambda x, a: torch.full((3,), a) + torch.full_like(x, a).sum(),
    lambda x, a: x.addcmul(x, x, value=a) + x.mul(a * 2 + 1),
    lambda x, a: x.clamp_min(a),  # of clamp(min=nan) torch 2.11 makes something else than 2.13
    lambda x, a: (x[0, 0] * a, (x > 0) * a),
    lambda x, a: x * abs(a),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_program_for_all_floats(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, a: float) -> list[torch.Tensor]:
        return [result for one in FUNCTIONS for result in _listed(one(x, a))]

    compiled = gradsplit.compile(function, fullgraph=True)
    torch.manual_seed(0)
    watch = Stopwatch()
    for value in VALUES:
        x = torch.randn(4, 3).to(dtype)
        for one, other in zip(compiled(x, value), function(x, value), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
    assert len(compiled.entries) == 2 and len(watch.seconds()["lower"]) == 2


def _listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def test_gradients_and_floats_that_the_backward_reads() -> None:
    def function(x: torch.Tensor, a: float) -> torch.Tensor:
        return ((x * a).sin() * (a * a)).exp()

    compiled = gradsplit.compile(function, fullgraph=True)
    watch = Stopwatch()
    for value in (0.5, 2.0, -1.5, 0.25):
        gradients = []
        for run in (compiled, function):
            x = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
            run(x, value).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)
    assert len(watch.seconds()["trace_joint"]) == 2


def test_functions_of_floats() -> None:
    """Python's functions of a float that differs, in the graph: a trace that runs them asks for the float's value."""

    def function(x: torch.Tensor, a: float) -> torch.Tensor:
        return x * math.sin(a) + math.cos(a + a / 2) * math.exp(a) - math.log(a + 3) / math.tanh(a) + a**2

    compiled = gradsplit.compile(function, fullgraph=True)
    watch = Stopwatch()
    for value in (0.5, 2.0, -1.5, 0.25):
        x = torch.ones(3, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, value), function(x, value))
    assert len(watch.seconds()["lower"]) == 2


aten = torch.ops.aten


def captured(build: Callable[..., None], *inputs: str) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    build(graph, *(graph.placeholder(name) for name in inputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def number(graph: torch.fx.Graph, function: Any, *operands: Any) -> torch.fx.Node:
    node = graph.call_function(function, operands)
    node.meta["example_value"] = 0.375
    return node


def tensors_of(module: torch.fx.GraphModule, *examples: Any) -> PartitionedGraph:
    graph = numbers_to_tensors(partition(trace_joint(module, examples, decomposition_table("cuda"))))
    assert not any(is_number(node) for node in graph.forward.graph.nodes)
    return graph


def test_numbers_of_the_cpu_go_to_the_accelerator_together() -> None:
    def build(graph: torch.fx.Graph, p: Any, q: Any, step: Any, lr: Any) -> None:
        count = graph.call_method("item", (graph.call_method("add_", (step, 1)),))
        graph.call_method("mul_", (p, number(graph, operator.truediv, lr, count)))
        graph.call_method("add_", (q, p), {"alpha": number(graph, operator.pow, 0.9, count)})
        graph.output((p,))

    with FakeTensorMode():
        examples = [torch.empty(4, device="cuda"), torch.empty(4, device="cuda"), torch.empty(()), 0.1]
    text = print_graph(tensors_of(captured(build, "p", "q", "step", "lr"), *examples).forward)
    assert text.count("device=cuda") == 1 and "float64[2] cuda:0 = _to_copy" in text
    assert "local_scalar" not in text


def test_a_count_on_the_accelerator_stays_there() -> None:
    def build(graph: torch.fx.Graph, p: Any, step: Any) -> None:
        count = graph.call_method("item", (step,))
        graph.call_method("mul_", (p, number(graph, operator.truediv, 1.0, count)))
        graph.output((p,))

    with FakeTensorMode():
        examples = [torch.empty(4, device="cuda"), torch.empty(1, device="cuda")]
    text = print_graph(tensors_of(captured(build, "p", "step"), *examples).forward)
    assert "cpu" not in text


def test_integers_out_of_tensors_stay_numbers_for_torchs_kernels() -> None:
    def build(graph: torch.fx.Graph, x: Any, count: Any) -> None:
        graph.output((graph.call_function(operator.add, (x, graph.call_method("item", (count,)))),))

    with FakeTensorMode():
        examples = [torch.empty(4, dtype=torch.int64), torch.empty((), dtype=torch.int64)]
    joint = trace_joint(captured(build, "x", "count"), examples, decomposition_table("cuda"))
    graph = numbers_to_tensors(partition(joint)).forward
    assert [node.target for node in graph.graph.nodes if is_number(node)] == [
        aten._local_scalar_dense.default
    ]
    assert graph(torch.arange(4), torch.tensor(3))[0].tolist() == [3, 4, 5, 6]


def test_the_greater_of_two_numbers_is_pythons() -> None:
    """Of which NaN is none, unless it comes first."""

    def build(graph: torch.fx.Graph, x: Any, read: Any) -> None:
        count = graph.call_method("item", (read,))
        found = [
            number(graph, function, *operands)
            for function in (torch.sym_max, torch.sym_min)
            for operands in ((1.0, count), (count, 1.0))
        ]
        graph.output(tuple(graph.call_function(operator.mul, (x, one)) for one in found))

    module = captured(build, "x", "read")
    with FakeTensorMode():
        examples = [torch.ones(()), torch.ones(())]
    graph = tensors_of(module, *examples).forward
    for value in (0.5, 2.0, float("nan")):
        given = [torch.ones(()), torch.tensor(value)]
        want = [f(*pair) for f in (max, min) for pair in ((1.0, value), (value, 1.0))]
        torch.testing.assert_close([one.item() for one in graph(*given)], want, equal_nan=True)
