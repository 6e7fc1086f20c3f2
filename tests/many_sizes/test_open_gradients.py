"""Gradients of graphs with open sizes: what is read, saved or changed beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit

NAN, INF = float("nan"), float("inf")
SAMPLES = torch.tensor(
    [[0.5, -0.5, 0.2, NAN], [INF, -INF, 1.0, 2.0], [0.0, -0.0, NAN, 3.0]], dtype=torch.float64
)
CLASSES = torch.tensor([1, 3, 0])
SETS = torch.tensor([[1, 3, -1, 0], [2, -1, 0, 0], [0, 1, 2, 3]])
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "margins": lambda x: F.multi_margin_loss(x, CLASSES, reduction="none"),
    "squared margins": lambda x: F.multi_margin_loss(x, CLASSES, p=2),
    "margins of sets": lambda x: F.multilabel_margin_loss(x, SETS, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_number_is_as_with_the_kernel(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Torch's forms in Python of these, which come before autograd where sizes are symbols, treat it otherwise."""
    run = LOSSES[name]
    made = gradsplit.compile(run, dynamic=True, backend="aot_eager")
    results = []
    for function in (run, made):
        x = SAMPLES.clone().requires_grad_()
        y = function(x)
        weights = torch.arange(1, y.numel() + 1).reshape(y.shape)
        results.append((y, *torch.autograd.grad((y * weights).sum(), x)))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert not any(record.name.startswith("gradsplit") for record in caplog.records)
    # Outside of a trace torch's own is there again.
    key = torch._C.DispatchKey.Autograd
    assert key in torch.ops.aten.multi_margin_loss.default.py_kernels


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_a_view_of_a_gradient_that_may_not_arrive(backend: str) -> None:
    def run(b: Tensor, d: Tensor) -> Any:
        rows = b.mean(-2)
        return rows.view_as(rows), rows, torch.fmin(rows, d)

    made = gradsplit.compile(run, dynamic=True, backend=backend)
    d = torch.randn(1, 1)
    for chosen in range(3):
        gradients = []
        b = torch.randn(2, 3 + chosen, requires_grad=True)
        for function in (run, made):
            gradients.append(torch.autograd.grad(function(b, d)[chosen].sum(), b)[0])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_saved_values_that_change_where_no_gradient_arrives(backend: str) -> None:
    """Zeros of the size that they had take their place."""
    made = gradsplit.compile(lambda a, b: (a.exp() * 2, b.sin() * b), dynamic=True, backend=backend)
    for size in (3, 5):
        a, b = (torch.randn(size, requires_grad=True) for _ in range(2))
        changed = b * 1
        result, _ = made(a, changed)
        changed.detach().resize_(size + 20).fill_(NAN)
        result.sum().backward()
        torch.testing.assert_close(a.grad, 2 * a.detach().exp())


def test_later_changes_of_an_input_that_plain_pytorch_does_not_save() -> None:
    def run(log: list[int], a: Tensor, c: Tensor) -> Tensor:
        similarity = F.cosine_similarity(a, c, -2)
        log.append(id(log))  # which ends the graph
        c.t().add_(1)
        return similarity

    made = gradsplit.compile(run, dynamic=True)
    for rows in (2, 3):
        x, c = torch.randn(rows, 5), torch.randn(rows, 5)
        gradients = []
        for function in (run, made):
            a = x.clone().requires_grad_()
            function([], a, c.clone()).sum().backward()
            gradients.append(a.grad)
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["min", "argmax", "amax"])
def test_an_extremum_of_nothing_is_the_error_that_it_is(name: str) -> None:
    for function in (lambda x: getattr(x, name)(0), gradsplit.compile(lambda x: getattr(x, name)(0))):
        with pytest.raises(IndexError, match="non-zero size"):
            function(torch.ones(0, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_hook_of_a_view_of_an_input(dynamic: bool) -> None:
    """A view that is made when the graph has run has no hook."""

    def run(b: Tensor) -> Any:
        first = b[..., 0]
        first.register_hook(lambda gradient: gradient * 2)
        return first, first[1:]

    for chosen in range(2):
        gradients = []
        b = torch.randn(4, 3, requires_grad=True)
        for function in (run, gradsplit.compile(run, dynamic=dynamic)):
            gradients.append(torch.autograd.grad(function(b)[chosen].sum(), b)[0])
        torch.testing.assert_close(*gradients)


def test_results_that_get_their_gradients_in_two_backwards() -> None:
    """What is kept for the second are tensors; sizes are saved beside them."""

    def run(b: Tensor, d: Tensor) -> Any:
        return torch.select_scatter(b, b.select(0, 0) * 2, 0, -1), d.sin().sum()

    b, d = (torch.randn(4, size, requires_grad=True) for size in (3, 5))
    scattered, total = gradsplit.compile(run, dynamic=True)(b, d)
    (of_total,) = torch.autograd.grad(total, d)
    (of_scattered,) = torch.autograd.grad(scattered.sum(), b)
    torch.testing.assert_close(of_total, d.cos())
    torch.testing.assert_close(of_scattered, torch.autograd.grad(run(b, d)[0].sum(), b)[0])
