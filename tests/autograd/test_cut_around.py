"""Calls that cannot be traced run with torch's own kernels, and nothing else of their graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.errors import Unsupported
from tests.programs.grouped_products import fake_product_of_groups, product_of_groups

# Its backward reads from memory where the groups end.
unseen_product = torch.library.custom_op(
    "gradsplit_tests::unseen_product", product_of_groups, mutates_args=()
)
unseen_product.register_fake(fake_product_of_groups)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    of_rows, of_weights, begin = torch.zeros_like(rows), torch.zeros_like(weights), 0
    for k, end in enumerate(ends.numpy().tolist()):
        of_rows[begin:end] = gradient[begin:end] @ weights[k].T
        of_weights[k] = rows[begin:end].T @ gradient[begin:end]
        begin = end
    return of_rows, of_weights, None


unseen_product.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Experts(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(layers))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, 8, 8)) for _ in range(layers))

    def forward(self, x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        for norm, weights in zip(self.norms, self.weights, strict=True):
            hidden = nn.functional.dropout(norm(x), 0.25, self.training)
            x = x + nn.functional.gelu(unseen_product(hidden, weights, ends))
        return x.square().mean(), x


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8, requires_grad=True), torch.tensor([3, 7, 12])


@pytest.fixture
def plain(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What runs with torch's own kernels."""

    class Texts(list[str]):
        def __iter__(self) -> Any:
            return (record.getMessage().partition(":")[0] for record in caplog.records)

    return Texts()


@pytest.mark.parametrize("is_trained", [True, False])
def test_only_the_calls_are_left_out(is_trained: bool, plain: list[str]) -> None:
    torch.manual_seed(0)
    model = Experts().train(is_trained)
    x, ends = given()
    compiled = gradsplit.compile(model, options={"fallback_random": True})
    for groups in (ends, torch.tensor([0, 12, 12])):
        found = []
        for call in (model, compiled):
            torch.manual_seed(1)
            loss, last = call(x, groups)
            found.append((loss, last, *torch.autograd.grad(loss, [x, *model.parameters()])))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert (
        list(plain) == ["a call of gradsplit_tests.unseen_product.default runs with torch's own kernels"] * 2
    )


@pytest.mark.parametrize("changes", [False, True])
def test_a_call_that_raises_is_made_again(changes: bool) -> None:
    """It has drawn its random numbers once then, and changed its input as often as plain Python does."""
    model = Experts()

    def program(x: Tensor, ends: Tensor, seen: Tensor) -> Tensor:
        if changes:
            seen.add_(1)
        return model(x, ends)[0]

    found = []
    for call in (program, gradsplit.compile(program, options={"fallback_random": True})):
        seen = torch.zeros(())
        for groups in (torch.tensor([3, 7, 12]), torch.tensor([3, 7, 9, 12])):  # more groups than weights
            torch.manual_seed(1)
            x = torch.ones(12, 8, requires_grad=True)
            try:
                loss = call(x, groups, seen).item()
            except Exception as error:
                loss = type(error).__name__
            found.append((loss, torch.rand(()).item(), seen.item()))
    assert found[2][1:] == found[0][1:] and found[2][0] == pytest.approx(found[0][0])
    assert found[3] == found[1] and found[1][0] == "IndexError"


def test_no_gradients_no_cut(plain: list[str]) -> None:
    model = Experts().eval()
    x, ends = given()
    with torch.no_grad():
        torch.testing.assert_close(gradsplit.compile(model)(x, ends), model(x, ends))
    assert list(plain) == []


def test_a_graph_that_fails_in_a_later_stage_stays_whole(
    monkeypatch: pytest.MonkeyPatch, plain: list[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise Unsupported("test", "no partition")

    monkeypatch.setattr(pipeline, "partition", refuse)
    x, _ = given()
    gradsplit.compile(lambda x: x.sin().cos().sum())(x).backward()
    assert list(plain) == ["a graph runs with torch's own kernels"]


def test_gradients_that_a_graph_asks_for_are_not_cut_from_what_they_are_of(plain: list[str]) -> None:
    """There is no place for a cut, and the search for one ends. A heaviside has no gradient, which is not asked for."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        step = torch.heaviside(x, y).neg_()
        (gradient,) = torch.autograd.grad(step.sin().sum(), [step])
        return step, gradient

    x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
    found = gradsplit.compile(program)(x, y)
    assert len([*plain]) == 1
    for one, other in zip(found, program(x, y), strict=True):
        torch.testing.assert_close(one, other)
