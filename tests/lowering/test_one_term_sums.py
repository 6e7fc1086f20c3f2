"""Sums with one term are looked up: the same values, whatever the place, and no reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradsplit.compile_core.ir.loops import LoopProgram, Reduce
from tests.lowering.lowering_harness import check, nests

ROWS, COLUMNS = 6, 5


def reductions(program: LoopProgram) -> int:
    return sum(isinstance(statement, Reduce) for nest in nests(program) for statement in nest.body)


def one_hot(target: Tensor, value: Tensor, start: int = 0) -> Tensor:
    places = torch.arange(start, start + COLUMNS)
    return torch.where(target[:, None] == places, value[:, None], 0.0)


PLACES = torch.tensor([0, 4, -1, 5, 2, -100])
VALUES = torch.tensor([1.5, -2.0, 3.0, 4.0, float("nan"), float("inf")])


@pytest.mark.parametrize(
    "program",
    [
        lambda target, value: one_hot(target, value).sum(1),
        lambda target, value: (-one_hot(target, value).bfloat16()).sum(1, keepdim=True).float(),
        lambda target, value: one_hot(target, value, 2).sum(1),
        lambda target, value: one_hot(target.int(), value).sum(1) * value,
        lambda target, value: one_hot(target, value).t().sum(0),
    ],
)
def test_look_ups(program: Callable[..., Tensor]) -> None:
    assert not reductions(check(program, PLACES, VALUES))


@pytest.mark.parametrize(
    "program",
    [
        lambda target, value: one_hot(target, value).sum(0),
        lambda target, value: one_hot(target, value).amax(1),
        lambda target, value: one_hot(target, value).sum(),
        lambda target, value: (one_hot(target, value) + 1).sum(1),
        lambda target, value: torch.where(target[:, None] == torch.arange(COLUMNS), value[:, None], 2.0).sum(
            1
        ),
        lambda target, value: torch.where(target[:, None] != torch.arange(COLUMNS), value[:, None], 0.0).sum(
            1
        ),
        lambda target, value: torch.where(target[:, None] == torch.arange(0, 2 * COLUMNS, 2), 1.0, 0.0).sum(
            1
        ),
        lambda target, value: torch.where(
            target[:, None] == torch.arange(COLUMNS), torch.arange(5.0), 0.0
        ).sum(1),
    ],
)
def test_sums_of_more_terms(program: Callable[..., Tensor]) -> None:
    assert reductions(check(program, PLACES, VALUES))


def test_the_gradient_of_a_cross_entropy_reduces_nothing() -> None:
    def gradient(scores: Tensor, target: Tensor, largest: Tensor, total: Tensor) -> Tensor:
        slope = one_hot(torch.where(target >= 0, target, 0), torch.where(target >= 0, -1.0, 0.0))
        return slope - torch.exp(scores - largest - total) * slope.sum(1, keepdim=True)

    scores = torch.randn(ROWS, COLUMNS)
    largest = scores.amax(1, keepdim=True)
    total = (scores - largest).exp().sum(1, keepdim=True).log()
    target = torch.tensor([0, 4, 1, -100, 2, 3])
    assert not reductions(check(gradient, scores, target, largest, total))
    expected = scores.clone().requires_grad_()
    F.cross_entropy(expected, target, reduction="sum").backward()
    torch.testing.assert_close(gradient(scores, target, largest, total), expected.grad)


def test_a_row_that_is_computed_once_for_two_readers() -> None:
    """Long to compute, it goes through memory, until its readers are one nest."""

    def gradient(target: Tensor, value: Tensor, scores: Tensor) -> Tensor:
        for _ in range(20):
            value = value * 0.5 + 1
        slope = one_hot(target, value)
        return slope - scores * slope.sum(1, keepdim=True)

    program = check(gradient, PLACES, VALUES, torch.randn(ROWS, COLUMNS))
    assert not reductions(program) and len(nests(program)) == 1


def test_what_is_stored_once_a_row_needs_the_reduction() -> None:
    def program(target: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        slope = one_hot(target, value)
        largest = scores.amax(1, keepdim=True)
        return slope.sum(1, keepdim=True) * (scores - largest), largest

    check(program, PLACES, VALUES, torch.randn(ROWS, COLUMNS))
