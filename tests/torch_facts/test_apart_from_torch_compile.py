"""Compiled modules and functions inside of what ``torch.compile`` made: each front end sees its own part."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import EagerAndRecordGraphs

import gradsplit


@pytest.fixture(autouse=True)
def fresh_front_end():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operations(backend):
    """What each graph that torch's front end compiled does."""
    return [
        [
            getattr(node.target, "__name__", node.target)
            for node in module.graph.nodes
            if node.op not in ("placeholder", "output")
        ]
        for module in backend.graphs
    ]


# Torch's front end looks at the gradient of all that goes on behind a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torchs_front_end_sees_neither_a_compiled_module_nor_its_backward():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    compiled = gradsplit.compile(copy.deepcopy(plain))
    backend = EagerAndRecordGraphs()

    def train(model, x):
        loss = model(x * 2).square().sum()
        loss.backward()
        return loss

    step = torch.compile(train, backend=backend, dynamic=False)
    for _ in range(3):
        x = torch.randn(3, 4)
        for module in (plain, compiled):
            module.zero_grad()
        torch.testing.assert_close(step(compiled, x), train(plain, x))
        for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
    assert operations(backend) == [["mul"], ["square", "sum"]]


def test_torchs_front_end_sees_no_capture_of_a_compiled_function():
    inner = gradsplit.compile(lambda x, k: x.sin() * k, backend="aot_eager")
    backend = EagerAndRecordGraphs()
    outer = torch.compile(lambda x, k: inner(x + 1, k) * 3, backend=backend, dynamic=False)
    for size in (3, 3, 4):  # the second size is captured again, within the outer call
        x = torch.randn(size)
        torch.testing.assert_close(outer(x, 5), (x + 1).sin() * 15)
    assert {name for graph in operations(backend) for name in graph} <= {"add", "mul"}


def test_what_torch_compiled_is_compiled_by_torch_where_plain_code_of_a_compiled_function_calls_it():
    backend = EagerAndRecordGraphs()
    theirs = torch.compile(lambda x: x.cos() + 1, backend=backend)

    @gradsplit.disable
    def plain(x):
        return theirs(x)

    ours = gradsplit.compile(lambda x: plain(x * 2) * 2, backend="aot_eager")
    outer = torch.compile(lambda x: ours(x) - 1, backend=backend)
    x = torch.randn(3)
    torch.testing.assert_close(outer(x), ((x * 2).cos() + 1) * 2 - 1)
    assert ["cos", "add"] in operations(backend)
