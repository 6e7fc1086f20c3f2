"""A tensor that requires no gradients is given to a program, which stores in it what requires them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradsplit


def add_rows(out: torch.Tensor, weight: torch.Tensor) -> Any:
    out.index_add_(0, torch.tensor([0, 2, 2]), weight[:3] * 2)
    return out.sum(), out.requires_grad, out.is_leaf


def scale_rows(out: torch.Tensor, weight: torch.Tensor) -> Any:
    rows = out[1:]
    rows.mul_(weight[0])
    return rows.sum() * 2


def read_before_and_after(out: torch.Tensor, weight: torch.Tensor) -> Any:
    before = out * 1
    out.mul_(weight[0])
    return before, out.detach(), out * 2


def change_again(out: torch.Tensor, weight: torch.Tensor) -> Any:
    out.mul_(weight[0])
    exponential = out.exp()
    out.zero_()
    return exponential


def overwrite(out: torch.Tensor, weight: torch.Tensor) -> Any:
    out.copy_(weight[: len(out)])
    return out


def without_gradients(out: torch.Tensor, weight: torch.Tensor) -> Any:
    with torch.no_grad():
        out.mul_(weight[0])
    return (out * weight[0]).sum()


PROGRAMS = [add_rows, scale_rows, read_before_and_after, change_again, overwrite, without_gradients]


def outcome(program: Callable[..., Any], is_view: bool) -> Any:
    """All that a caller sees, the history of a base included."""
    torch.manual_seed(0)
    base = torch.randn(6, 3)
    out = base[:4] if is_view else base
    weight = torch.randn(6, 3, requires_grad=True)
    results = program(out, weight)
    seen = [*results] if isinstance(results, tuple) else [results]
    tensors = [value for value in (*seen, out, base) if isinstance(value, torch.Tensor)]
    torch.stack([(value**2).sum() for value in tensors if value.requires_grad]).sum().backward()
    constants = [value for value in seen if not isinstance(value, torch.Tensor)]
    return constants, [(value.requires_grad, value.detach()) for value in tensors], weight.grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_has_the_history_of_what_was_stored(program: Any, is_view: bool, backend: str) -> None:
    compiled = gradsplit.compile(program, fullgraph=True, backend=backend)
    plain = outcome(program, is_view)
    for _ in range(2):
        torch.testing.assert_close(outcome(compiled, is_view), plain)


def scale_and_go_on(out: torch.Tensor, weight: torch.Tensor) -> Any:
    out.mul_(weight[0])
    double = out * 2
    return double, double.sin() * weight[0]


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_results_made_of_it_are_linked(backend: str) -> None:
    """The graph is cut after the change, and each piece sees the input as it is by then."""
    compiled = gradsplit.compile(scale_and_go_on, backend=backend, options={"linked_results": True})
    found = []
    for program in (scale_and_go_on, compiled):
        torch.manual_seed(0)
        out, weight = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
        double, last = program(out, weight)
        found.append(torch.autograd.grad(last.sum() + out.sum(), [double, out, weight]))
    torch.testing.assert_close(*found)
