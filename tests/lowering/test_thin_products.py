"""Products of long matrices with a few columns are sums; all others are left to libraries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.decompositions.thin_products import addmm, mm
from tests.autograd.compare_with_eager import captured, fakes

aten = torch.ops.aten
LONG = 5000


def matrices(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, inner, generator=generator).to(dtype),
        torch.randn(inner, columns, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sides", [(LONG, 4, 4), (LONG, 1, 8), (4, LONG, 3), (1, LONG, 1)])
def test_as_near_to_float64_as_rounding_the_result_allows(
    sides: tuple[int, int, int], dtype: torch.dtype
) -> None:
    left, right = matrices(*sides, dtype)
    exact = left.double() @ right.double()
    unit = torch.finfo(dtype).eps
    for matrix in (left, left.t().contiguous().t()):
        found = mm(matrix, right)
        assert found.dtype == dtype
        allowed = unit * exact.abs() + 1e-6 * (left.double().abs() @ right.double().abs())
        assert ((found.double() - exact).abs() <= allowed).all()
    summand = torch.randn(sides[2]).to(dtype)
    torch.testing.assert_close(addmm(summand, left, right).double(), exact + summand, rtol=unit, atol=1e-2)


@pytest.mark.parametrize(
    "sides", [(100, 4, 4), (LONG, 9, 4), (LONG, 4, 9), (9, LONG, 4), (LONG, 0, 4), (4, 4, 4)]
)
def test_others_stay(sides: tuple[int, int, int]) -> None:
    assert mm(*matrices(*sides, torch.bfloat16)) is NotImplemented


def test_what_is_not_a_plain_sum_stays() -> None:
    left, right = matrices(LONG, 4, 4, torch.bfloat16)
    assert addmm(torch.ones(4).bfloat16(), left, right, beta=2) is NotImplemented
    assert mm(*matrices(LONG, 4, 4, torch.float64)) is NotImplemented
    assert mm(left.int(), right.int()) is NotImplemented


def test_neither_mixed_heads_nor_their_gradients_are_products() -> None:
    def mixed(scores: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.linear(scores, weight, bias).softmax(1)

    scores = torch.randn(2, 60, 60, 4, requires_grad=True)
    given = [scores, torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
    joint = trace_joint(captured(mixed), fakes(given), decomposition_table("cuda"))
    targets = {node.target for node in joint.module.graph.nodes}
    assert not targets & {aten.mm.default, aten.addmm.default, aten.bmm.default}
    expected = mixed(*given)
    tangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, given, tangent)
    with torch.no_grad():
        found = joint.module(*given, tangent)
    torch.testing.assert_close(found, [expected, *gradients], rtol=1e-4, atol=1e-4)
