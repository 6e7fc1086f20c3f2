"""Copies that a traced graph does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core.autograd.trace_joint import trace_joint


def copies(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """How many copies are in the joint graph of a function."""
    with FakeTensorMode():
        examples = [torch.empty(shape, requires_grad=True) for shape in shapes]
    graph = trace_joint(fx.symbolic_trace(function), examples, {}).module.graph
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))


def test_what_is_turned_and_turned_back_is_not_copied() -> None:
    def turn(x: Tensor) -> Tensor:
        turned = x.exp().transpose(1, 2).contiguous()
        return turned.permute(0, 2, 1, 3).contiguous().view(2, -1).sin()

    assert copies(turn, (2, 3, 4, 5)) == 0


def test_a_copy_to_another_layout_stays() -> None:
    assert copies(lambda x: (x.exp().t().contiguous() + 1).view(-1), (2, 3)) == 1


def test_a_copy_of_a_copy_is_one_copy() -> None:
    assert copies(lambda x: x.exp().t().contiguous().unsqueeze(0).clone().view(-1).sin(), (2, 3)) == 1


def test_a_copy_that_has_other_readers_stays() -> None:
    def read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.exp().t().contiguous()
        return turned.view(-1).sin(), turned.t().contiguous().view(-1).cos()

    assert copies(read_twice, (2, 3)) == 2


def test_a_copy_of_a_part_stays() -> None:
    """Else whoever keeps the part keeps the whole."""
    assert copies(lambda x: x.exp()[:1].clone().sin(), (8, 3)) == 1


def test_copies_of_inputs_stay() -> None:
    assert copies(lambda x: x.clone().sin(), (2, 3)) == 1


def test_results_that_were_copies_are_tensors_of_their_own() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        result = x.exp()
        return result, result.clone()

    first, second = gradsplit.compile(twice, backend="aot_eager")(torch.zeros(3))
    first.add_(1)
    assert second.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
def test_a_copy_that_keeps_the_order_of_a_copy_is_not_made_of_the_original(backend: str) -> None:
    """It lay in the original's order, and complex numbers, which torch's own kernel copies, were read in the other."""

    def turn(x: Tensor) -> tuple[Tensor, Tensor]:
        copied = torch.polar(x, x).t().contiguous().t().clone()
        return copied, torch.view_as_real(copied).sin()

    x = torch.randn(4, 6)
    found, expected = gradsplit.compile(turn, backend=backend, fullgraph=True)(x), turn(x)
    torch.testing.assert_close(found, expected)
    assert [result.stride() for result in found] == [result.stride() for result in expected]
