"""The gradient of max pooling, with and without overlapping windows, padding, channels last and narrow floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.autograd.compare_with_eager import check, compile_program

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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value):
    x = torch.randn(1, 1, 8, 8)
    x[0, 0, 3, 3] = value
    check(_pool(CASES[0]), x.requires_grad_(), backend="triton", rtol=1e-6, atol=1e-6)
