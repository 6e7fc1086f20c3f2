"""A graph that holds its own backward keeps what two programs would, and computes the rest again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.autograd.operators.graph_nodes import memory_of
from gradsplit.compile_core.autograd.partitioning.own_backwards import recompute_for_own_backwards


def most_bytes(module: GraphModule) -> int:
    """How many bytes the results of operators take at most, each until it is last read, in the graph's order."""
    nodes = list(module.graph.nodes)
    last = {memory_of(read): place for place, node in enumerate(nodes) for read in node.all_input_nodes}
    size = {
        node: node.meta["val"].nbytes
        for node in nodes
        if node.op == "call_function" and memory_of(node) is node and isinstance(node.meta.get("val"), Tensor)
    }
    held = most = 0
    for place, node in enumerate(nodes):
        held += size.get(node, 0)
        most = max(most, held)
        held -= sum(
            size.get(read, 0)
            for read in {memory_of(read) for read in node.all_input_nodes}
            if last[read] == place
        )
    return most


@pytest.fixture
def peaks(monkeypatch):
    """Of each graph that is partitioned: before and after."""
    found: list[tuple[int, int]] = []
    partition = pipeline.partition

    def watched(joint: Any, budget: float) -> Any:
        graph = partition(joint, budget)
        if graph.backward is None:
            found.append((most_bytes(joint.module), most_bytes(graph.forward)))
        return graph

    monkeypatch.setattr(pipeline, "partition", watched)
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step(blocks, x, by_checkpoints=False):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if by_checkpoints else block(x)
    loss = x.square().mean()
    loss.backward()
    return loss.detach()


def test_what_is_cheap_is_computed_again(peaks):
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Block() for _ in range(6)), torch.randn(1024, 8)
    gradsplit.compile(step, fullgraph=True)(blocks, x)
    gradients = [parameter.grad for parameter in blocks.parameters()]
    blocks.zero_grad()
    step(blocks, x)
    torch.testing.assert_close(gradients, [parameter.grad for parameter in blocks.parameters()])
    ((before, after),) = peaks
    assert after < 0.85 * before


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_checkpoints_keep_what_they_are_given(peaks, backend):
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Block() for _ in range(6)), torch.randn(1024, 8)
    named = {} if backend is None else {"backend": backend}
    compiled = gradsplit.compile(step, fullgraph=True, **named)
    compiled(blocks, x)
    blocks.zero_grad()
    compiled(blocks, x, by_checkpoints=True)
    gradients = [parameter.grad for parameter in blocks.parameters()]
    blocks.zero_grad()
    step(blocks, x)
    torch.testing.assert_close(gradients, [parameter.grad for parameter in blocks.parameters()])
    assert peaks[-1][1] < 0.5 * peaks[0][1]


def test_a_budget_holds_within_a_graph(peaks):
    def run(budget):
        torch.manual_seed(0)
        blocks, x = nn.ModuleList(Block() for _ in range(6)), torch.randn(1024, 8)
        gradsplit.reset()
        options = {"activation_memory_budget": budget}
        gradsplit.compile(step, fullgraph=True, options=options)(blocks, x)
        return peaks[-1][1]

    assert run(0.2) < 0.7 * run(1.0)


def test_random_numbers_are_drawn_once():
    def program(x):
        loss = nn.functional.dropout(x.sin(), 0.5).exp().sum()
        loss.backward()
        return torch.rand(2)

    x = torch.randn(64, requires_grad=True)
    compiled = gradsplit.compile(program, backend="aot_eager", fullgraph=True)
    found = []
    for run in (program, compiled):
        torch.manual_seed(0)
        x.grad = None
        found.append((run(x), x.grad))
    torch.testing.assert_close(found[0], found[1])


def test_other_graphs_stay_as_they_are():
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.sin, (graph.placeholder("x"),)),))
    module = GraphModule({}, graph)
    assert recompute_for_own_backwards(module, 1.0) is module
