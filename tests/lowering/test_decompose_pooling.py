"""Pooling and its gradient, with and without overlapping windows, padding, channels last and narrow floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.pooling import GRADIENT, MAX_POOL, PLACES, POSITIONS
from gradsplit.compile_core.lowering.decompositions.decompose_pooling import avg_pool2d
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from tests.autograd.compare_with_eager import captured, check, compile_program, fakes

CASES = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 3, "stride": 1, "dilation": 2},
    {"kernel_size": 12, "stride": 1, "padding": 6},
]


def _pool(settings):
    return lambda x: F.max_pool2d(x * 2, **settings).relu()


@pytest.mark.parametrize("shape", [(2, 3, 13, 14), (3, 13, 14)])
@pytest.mark.parametrize("settings", CASES)
def test_gradient(settings, shape):
    x = torch.randn(*shape, requires_grad=True)
    check(_pool(settings), x, backend="triton", rtol=1e-6, atol=1e-6)


def test_channels_last():
    x = torch.randn(2, 3, 13, 14).to(memory_format=torch.channels_last).requires_grad_()
    check(_pool(CASES[0]), x, backend="triton", rtol=1e-6, atol=1e-6)


def test_equal_values_choose_the_same_place():
    x = torch.randint(3, (2, 3, 13, 14)).float().requires_grad_()
    check(_pool(CASES[0]), x, backend="triton", rtol=1e-6, atol=1e-6)


def test_narrow_floats_add_up_in_float32():
    x = torch.ones(1, 1, 9, 9, dtype=torch.bfloat16, requires_grad=True)
    check(_pool({"kernel_size": 3, "stride": 1, "padding": 1}), x, backend="triton", rtol=0, atol=0)


def test_a_window_is_remembered_in_a_byte():
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    compiled = compile_program(lambda x: F.max_pool2d(x, 2), [x], backend="triton")
    assert compiled.partitioned.saved_bytes == 2 * 3 * 8 * 8


def test_nothing_is_left_to_torch():
    """One nest pools, one gathers; the program neither scatters nor sees a position."""
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    compiled = compile_program(_pool(CASES[0]), [x], backend="triton")
    graphs = (compiled.partitioned.forward, compiled.partitioned.backward)
    targets = {node.target for graph in graphs for node in graph.graph.nodes}
    assert {MAX_POOL, GRADIENT} <= targets
    assert not {POSITIONS, PLACES, torch.ops.aten.scatter_add.default} & targets


def test_positions():
    x = torch.randn(2, 3, 13, 14)
    check(lambda x: F.max_pool2d(x * 2, **CASES[0], return_indices=True)[1], x, backend="triton")


def test_a_window_of_the_lowest_value():
    """The first element inside of the plane gets the gradient, not a place of the padding."""
    x = torch.full((1, 1, 8, 8), -float("inf"), requires_grad=True)
    check(lambda x: F.max_pool2d(x, **CASES[0]), x, backend="triton")


def test_of_several_nans_the_last_gets_the_gradient():
    x = torch.randn(1, 2, 8, 8)
    x[:, :, 2:5, 3:5] = float("nan")
    check(lambda x: F.max_pool2d(x, **CASES[0]), x.requires_grad_(), backend="triton")


def test_no_images():
    x = torch.randn(0, 3, 8, 8, requires_grad=True)
    check(lambda x: F.max_pool2d(x, **CASES[0]), x, backend="triton")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value):
    x = torch.randn(1, 1, 8, 8)
    x[0, 0, 3, 3] = value
    check(_pool(CASES[0]), x.requires_grad_(), backend="triton", rtol=1e-6, atol=1e-6)


MEANS = [
    ({"kernel_size": 2}, (2, 3, 12, 14)),
    ({"kernel_size": (3, 2), "divisor_override": 5}, (3, 12, 14)),
    ({"kernel_size": 2}, (2, 3, 13, 14)),
    ({"kernel_size": 2, "ceil_mode": True}, (2, 3, 13, 14)),
    ({"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, (2, 3, 13, 14)),
]


@pytest.mark.parametrize(("settings", "shape"), MEANS)
def test_means(settings, shape):
    x = torch.randn(*shape, requires_grad=True)
    check(lambda x: F.avg_pool2d(x * 2, **settings).sin(), x, backend="triton", rtol=1e-6, atol=1e-6)


def test_means_of_tiles_are_left_to_no_kernel_of_torch():
    x = torch.randn(2, 3, 12, 14).to(memory_format=torch.channels_last).requires_grad_()
    compiled = compile_program(lambda x: F.avg_pool2d(x.sin(), 2), [x], backend="triton")
    graphs = (compiled.partitioned.forward, compiled.partitioned.backward)
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("pool" in name for name in names)
    check(lambda x: F.avg_pool2d(x.sin(), 2), x, backend="triton", rtol=1e-6, atol=1e-6)


def test_means_of_narrow_floats_add_up_in_float32():
    x = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).view(1, 1, 2, 2).requires_grad_()
    check(lambda x: F.avg_pool2d(x, 2), x, backend="triton", rtol=0, atol=0)


OVERLAPPING = [
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": (2, 4), "stride": 1, "padding": (0, 2), "count_include_pad": False},
    {"kernel_size": 3, "stride": 1, "divisor_override": 5},
    {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    {"kernel_size": 2, "stride": 3},
]


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (3, 9, 8)])
@pytest.mark.parametrize("settings", OVERLAPPING)
def test_means_of_windows_that_overlap(settings, shape):
    """On GPUs; windows at every place leave nothing to torch's kernels."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    joint = trace_joint(
        captured(lambda x: F.avg_pool2d(x, **settings)), fakes([x]), decomposition_table("cuda")
    )
    targets = {node.target for node in joint.module.graph.nodes}
    assert torch.ops.aten.avg_pool2d.default not in targets
    is_dense = settings["stride"] == 1
    assert (torch.ops.aten.avg_pool2d_backward.default not in targets) == is_dense
    expected = F.avg_pool2d(x, **settings)
    tangent = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, tangent)
    with torch.no_grad():
        found = joint.module(x, tangent)
    torch.testing.assert_close(found, [expected, gradient], rtol=1e-12, atol=1e-12)


def test_overlapping_means_of_narrow_floats_add_up_in_float32():
    x = torch.ones(1, 1, 9, 9, dtype=torch.bfloat16)
    found = avg_pool2d(x, [5, 5], [1, 1], [2, 2], tiles_only=False)
    torch.testing.assert_close(found, F.avg_pool2d(x, 5, 1, 2), rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{"ceil_mode": True}, {"kernel_size": [7, 7], "padding": [3, 3]}])
def test_other_means_are_left_to_torch(settings):
    x = torch.randn(1, 1, 9, 9)
    windows = {"kernel_size": [5, 5], "stride": [2, 2], "padding": [1, 1], **settings}
    found = avg_pool2d(x, **windows, tiles_only=False)
    assert found is NotImplemented
