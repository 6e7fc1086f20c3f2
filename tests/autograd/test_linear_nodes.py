"""What is called linear is: sums and multiples of arguments give sums and multiples of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.autograd.operators.linear_nodes import is_linear, is_zero
from tests.lowering.lowering_harness import trace

LINEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "negative": lambda x, y: -x,
    "times": lambda x, y: y * x,
    "times a number": lambda x, y: 3 * x,
    "divided": lambda x, y: x / y,
    "sum of both": lambda x, y: x + 2 * x - y * x,
    "chosen": lambda x, y: torch.where(y > 0, x, 0.0),
    "chosen of two": lambda x, y: torch.where(y > 0, -x, x * y),
    "transposed": lambda x, y: x.t().unsqueeze(0).expand(2, 4, 4),
    "product": lambda x, y: x @ y + y @ x,
    "sums": lambda x, y: (x.sum(0), x.mean(1, keepdim=True), x.sum()),
    "put among zeros": lambda x, y: torch.cat([x, torch.zeros_like(y)]),
    "put into zeros": lambda x, y: torch.slice_scatter(torch.zeros_like(y), x[:, 1:], 1, 1),
    "padded": lambda x, y: torch.nn.functional.pad(x, (1, 2)),
    "wider": lambda x, y: x.double(),
    "looked up": lambda x, y: x.gather(1, (y > 0).long()),
    "added up": lambda x, y: torch.zeros_like(y).scatter_add(1, (y > 0).long(), x),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "square": lambda x, y: x * x,
    "divisor": lambda x, y: y / x,
    "plus a number": lambda x, y: x + 1,
    "plus another": lambda x, y: x - y,
    "exponential": lambda x, y: x.exp(),
    "chosen by": lambda x, y: torch.where(x > 0, x, 0.0),
    "chosen or one": lambda x, y: torch.where(y > 0, x, 1.0),
    "put among others": lambda x, y: torch.cat([x, y]),
    "put into others": lambda x, y: torch.slice_scatter(y, x[:, 1:], 1, 1),
    "padded with ones": lambda x, y: torch.nn.functional.pad(x, (1, 2), value=1.0),
    "largest": lambda x, y: x.amax(0),
    "whole numbers": lambda x, y: x.long(),
    "looked up by": lambda x, y: y.gather(1, (x > 0).long()),
    "added to others": lambda x, y: y.scatter_add(1, (y > 0).long(), x),
}


def results_are_linear(function: Callable[[Tensor, Tensor], Any]) -> bool:
    graph = trace(function, torch.ones(4, 4), torch.ones(4, 4), decompose=False).graph
    first, *_ = graph.nodes
    varying = {first}
    for node in graph.nodes:
        if node.op != "output" and not varying.isdisjoint(node.all_input_nodes):
            if not is_linear(node, varying):
                return False
            varying.add(node)
    return True


@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators(name: str) -> None:
    assert results_are_linear(LINEAR[name])
    x, other, y = torch.randn(3, 4, 4, dtype=torch.float64)

    def run(value: Tensor) -> list[Tensor]:
        return tree_leaves(LINEAR[name](value, y))

    for both, one, two in zip(run(2 * x + other), run(x), run(other), strict=True):
        torch.testing.assert_close(both, 2 * one + two)


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name: str) -> None:
    assert not results_are_linear(OTHERS[name])


def test_zeros() -> None:
    def made(x: Tensor) -> Any:
        zeros = torch.zeros_like(x), torch.full((2, 2), 0).expand(3, 2, 2), torch.zeros(3).double()[1:]
        return (*zeros, torch.ones_like(x), torch.full((2,), 0.5), x - x)

    results = trace(made, torch.ones(2), decompose=False).graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    assert [is_zero(node) for node in results] == [True] * 3 + [False] * 3
    assert is_zero(0) and is_zero(0.0) and not is_zero(1) and not is_zero(None)
