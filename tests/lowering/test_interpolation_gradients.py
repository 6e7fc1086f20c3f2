"""Gradients of linear interpolation, by ratios of sides, alignment of corners and scales, against torch's kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.decompositions.interpolation_gradients import INTERPOLATION_GRADIENTS
from tests.autograd.compare_with_eager import captured, fakes

aten = torch.ops.aten
OPERATORS = {
    1: aten.upsample_linear1d_backward.default,
    2: aten.upsample_bilinear2d_backward.default,
    3: aten.upsample_trilinear3d_backward.default,
}
# Elements and the places they are interpolated to, with what the user gave as the ratio.
SIDES = [
    (elements, places, scale)
    for elements, places in itertools.product([1, 2, 3, 7, 16], [1, 2, 3, 5, 21, 64])
    for scale in (None, places / elements, (places + 0.3) / elements)
    if scale is None or int(elements * scale) == places != elements
]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_same_sums(dims: int, aligned: bool) -> None:
    for elements, places, scale in SIDES:
        shape, outer = [2, 2, *[4] * (dims - 1), elements], [8] * (dims - 1)
        grad = torch.randn(2, 2, *outer, places, dtype=torch.float64)
        settings = ([*outer, places], shape, aligned, *[None] * (dims - 1), scale)
        found = INTERPOLATION_GRADIENTS[OPERATORS[dims]](grad, *settings)
        torch.testing.assert_close(found, OPERATORS[dims](grad, *settings), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_add_up_in_float32(dtype: torch.dtype) -> None:
    grad = torch.rand(1, 2, 64, 64).to(dtype)
    settings = ([64, 64], [1, 2, 4, 4], False)
    exact = OPERATORS[2](grad.double(), *settings)
    found = INTERPOLATION_GRADIENTS[OPERATORS[2]](grad, *settings)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()


def test_what_is_infinite_stays_where_it_is() -> None:
    grad = torch.randn(1, 1, 16, 24, dtype=torch.float64)
    grad[0, 0, 6, 9] = torch.inf
    settings = ([16, 24], [1, 1, 4, 6], False)
    expected = OPERATORS[2](grad, *settings)
    assert expected.isinf().sum() == 4
    torch.testing.assert_close(INTERPOLATION_GRADIENTS[OPERATORS[2]](grad, *settings), expected)


def test_equal_sides_are_copied_whatever_the_scale() -> None:
    grad = torch.randn(1, 1, 2, 2)
    found = INTERPOLATION_GRADIENTS[OPERATORS[2]](grad, [2, 2], [1, 1, 2, 2], False, 1.2, 1.2)
    assert torch.equal(found, grad)
    assert found is not grad


def test_no_images() -> None:
    grad = torch.randn(0, 3, 8, 8)
    found = INTERPOLATION_GRADIENTS[OPERATORS[2]](grad, [8, 8], [0, 3, 2, 2], False)
    assert found.shape == (0, 3, 2, 2)


def test_a_step_adds_by_no_atomic_operation() -> None:
    def larger(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=4.0, mode="bilinear")

    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    joint = trace_joint(captured(larger), fakes([x]), decomposition_table("cuda"))
    assert OPERATORS[2] not in {node.target for node in joint.module.graph.nodes}
    expected = larger(x)
    tangent = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, tangent)
    with torch.no_grad():
        found = joint.module(x, tangent)
    torch.testing.assert_close(found, [expected, gradient])


@pytest.mark.parametrize(("dims", "mode"), [(1, "linear"), (2, "bilinear"), (3, "trilinear")])
def test_between_equal_infinities(dims: int, mode: str) -> None:
    """Also where sizes are open."""

    def program(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=1.5, mode=mode)

    compiled = gradsplit.compile(program, dynamic=True, fullgraph=True)
    for size in (2, 3, 4):
        x = torch.full((1, 2, *[size] * dims), -torch.inf)
        x[:, 1] = torch.randn(size)
        x.requires_grad_()
        found, expected = compiled(x), program(x)
        torch.testing.assert_close(found, expected, equal_nan=True)
        gradients = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients)
