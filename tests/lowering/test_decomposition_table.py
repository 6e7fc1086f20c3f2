"""Operators that are taken apart equal torch's kernels, also where numbers are none or infinite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core.backends import aot_eager, generated_kernels
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph

NAN, INF = float("nan"), float("inf")


def decomposed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with operators taken apart, and torch's kernels for what is left."""
    backend = RegionBackend("decomposed", aot_eager.compile_region, generated_kernels.decompositions)
    return CompiledFunction(
        function, functools.partial(compile_graph, backend=backend, options=CompileOptions()), fullgraph=True
    )


def values_and_gradients(function: Callable[..., Any], x: Tensor, *others: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    results = function(leaf, *others)
    results = results if isinstance(results, list) else [results]
    slopes = [torch.arange(1.0, 1 + result.numel()).view(result.shape) for result in results]
    return [*results, *torch.autograd.grad(results, leaf, slopes)]


def losses(x: Tensor, target: Tensor, weights: Tensor) -> list[Tensor]:
    return [
        loss(x, target, weight, reduction=reduction)
        for loss in (F.nll_loss, F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.1))
        for reduction in ("mean", "sum", "none")
        for weight in (None, weights)
    ]


@pytest.mark.parametrize("all_ignored", [False, True])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 4, 2), (2, 4, 3, 2)])
def test_ignored_rows_of_losses_by_class(shape: tuple[int, ...], all_ignored: bool) -> None:
    torch.manual_seed(len(shape))
    class_dim = min(len(shape) - 1, 1)
    target = torch.randint(0, 4, (*shape[:class_dim], *shape[class_dim + 1 :]))
    ignored = (torch.arange(target.numel()) % 2 == 0).view(target.shape) | all_ignored
    holes = torch.tensor([NAN, INF, 1.0, -INF]).view(4, *[1] * (len(shape) - class_dim - 1))
    x = torch.where(ignored.unsqueeze(class_dim), holes, torch.randn(shape))
    arguments = x, torch.where(ignored, -100, target), torch.tensor([0.5, 1.0, 2.0, 0.0])
    expected = values_and_gradients(losses, *arguments)
    torch.testing.assert_close(values_and_gradients(decomposed(losses), *arguments), expected, equal_nan=True)


@pytest.mark.parametrize("classes", [4, 5000])
def test_ignored_rows_in_kernels(classes: int) -> None:
    x = torch.randn(3, classes)
    x[0] = NAN
    x[2, 1] = INF
    arguments = x, torch.tensor([-100, 2, -100])
    expected = values_and_gradients(F.cross_entropy, *arguments)
    found = values_and_gradients(gradsplit.compile(F.cross_entropy), *arguments)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.logit(x, 0.1),
        torch.logit,
        lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
        lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum", beta=2.0),
        lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
        lambda x: F.soft_margin_loss(x, -torch.ones_like(x), reduction="sum"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, 0.5, 1.0, 3.0])
def test_gradients_of_one_element(value: float, function: Callable[..., Any]) -> None:
    """Of more, kernels of the CPU treat some by formulas of their own."""
    x = torch.tensor([value])
    expected = values_and_gradients(function, x)
    torch.testing.assert_close(values_and_gradients(decomposed(function), x), expected, equal_nan=True)


@pytest.mark.parametrize("position", [[0], [2], [4], [1, 4], [0, 1, 2, 3, 4], []])
@pytest.mark.parametrize("function", [torch.var_mean, torch.std_mean])
def test_the_mean_of_a_row_with_infinity(function: Callable[..., Any], position: list[int]) -> None:
    """It is found step by step, so that a later element makes it NaN."""
    x = torch.randn(3, 5)
    x[1, position], x[2, :1] = -INF, NAN
    for program in (function, functools.partial(function, dim=1), functools.partial(function, dim=0)):
        torch.testing.assert_close(gradsplit.compile(program)(x), program(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_have_no_deviation(dtype: torch.dtype) -> None:
    """Theirs is exactly 0, where the gradient of its root is, too."""
    for count in (3, 7, 100):
        x = torch.tensor([0.1, 2.7, 1e10 + 0.3], dtype=dtype).expand(count, 3).clone().requires_grad_()
        deviation = gradsplit.compile(functools.partial(torch.std, dim=0))(x)
        deviation.sum().backward()
        assert not deviation.any() and x.grad is not None and not x.grad.any()


def test_running_means_of_infinite_channels() -> None:
    """Of a batch, the mean is a sum divided."""

    def program(x: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        return F.batch_norm(x, mean, variance, training=True), mean, variance

    x = torch.randn(4, 3)
    x[0, 0], x[1, 1] = INF, NAN
    found = gradsplit.compile(program)(x, torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(found, program(x, torch.zeros(3), torch.ones(3)), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=NAN),
        lambda x: (x * 2).clamp_(max=NAN),
        lambda x: x.clamp(0.0, NAN) + 1,
        lambda x: x.clamp_min(NAN) + x.clamp_max(NAN),
    ],
)
def test_a_bound_that_is_no_number(function: Callable[..., Any]) -> None:
    """Versions of torch disagree about it."""
    x = torch.randn(20)
    torch.testing.assert_close(gradsplit.compile(function)(x), function(x), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        F.hardtanh,
        F.relu6,
        F.hardswish,
        F.elu,
        lambda x: F.celu(x, 1.5),
        F.selu,
        lambda x: F.elu(x + 0, inplace=True),
    ],
)
def test_gradients_of_whole_vectors(function: Callable[..., Any]) -> None:
    x = torch.tensor(
        [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 6.0, 3.0, -3.0, 0.5, -0.5, 7.0, -4.0, 2.0, -2.0] * 8
    )
    expected = values_and_gradients(function, x)
    torch.testing.assert_close(values_and_gradients(gradsplit.compile(function), x), expected, equal_nan=True)


@pytest.mark.parametrize("count", [2, 8, 9, 48, 50])
@pytest.mark.parametrize("large", [1e15, -1e25, INF])
def test_normalised_rows_of_large_numbers(count: int, large: float) -> None:
    """Torch's kernel for CPUs makes no number of a row whose mean has an infinite square, if it has an empty lane."""
    torch.manual_seed(count)
    x = large * (1 + torch.rand(4, count) / 10)

    def program(x: Tensor) -> list[Tensor]:
        rows = F.layer_norm(x, (count,), torch.full((count,), 2.0), torch.ones(count))
        return [rows, F.group_norm(x.view(2, 2, count), 2)]

    torch.testing.assert_close(decomposed(program)(x), program(x), equal_nan=True)


def test_zeros_of_normalised_rows_have_their_sign() -> None:
    """Torch's kernel for CPUs adds a bias where there is none, too, and 0.0 - 0.0 is 0.0."""
    x = torch.full((2, 5), 3.0)
    for bias in (None, torch.zeros(5), -torch.zeros(5)):
        expected = F.layer_norm(x, (5,), -torch.ones(5), bias)
        found = gradsplit.compile(F.layer_norm)(x, (5,), -torch.ones(5), bias)
        assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_add_up_as_in_the_kernel(dtype: torch.dtype) -> None:
    """It rounds once after a product and a sum, so that two halves are not exactly one."""
    x = torch.arange(-20, 20, dtype=dtype)
    assert torch.equal(gradsplit.compile(torch.logaddexp2)(x, x), torch.logaddexp2(x, x))
