"""Convolutions of each channel by itself without gradients are sums over windows: the numbers are a convolution's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core.ir.pooling import WINDOW_SUMS
from tests.lowering.test_convolution_layouts import compiled_as_on_a_gpu
from tests.lowering.test_patch_convolutions import count, joint_of

aten = torch.ops.aten


def images(channels: int = 8, side: int = 9) -> Tensor:
    return torch.randn(2, channels, side, side + 2).bfloat16()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("window", "settings"),
    [
        ((3, 3), {"padding": 1}),
        ((3, 3), {"stride": 2, "padding": 1}),
        ((5, 5), {"stride": (2, 1), "padding": 2}),
        ((3, 1), {"padding": (1, 0)}),
        ((2, 4), {}),
        ((5, 5), {"padding": 4}),
    ],
)
def test_values_and_strides(window, settings, layout) -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.relu(F.conv2d(x * 1.5, weight, bias, groups=8, **settings))

    torch.manual_seed(0)
    x = images().contiguous(memory_format=layout)
    inputs = [x, torch.randn(8, 1, *window).bfloat16(), torch.randn(8).bfloat16()]
    with torch.no_grad():
        joint = joint_of(program, inputs)
        assert count(joint, aten.convolution.default) == 0 and count(joint, WINDOW_SUMS) == 1
        found, plain = compiled_as_on_a_gpu(program)(*inputs), program(*inputs)
    true = program(*(tensor.double() for tensor in inputs))
    assert found.stride() == plain.stride()
    # The bias is added to a result that was rounded, as in torch's kernels for GPUs.
    assert (found - true).norm() <= 1.6 * (plain - true).norm()


@pytest.mark.parametrize(
    ("weight", "settings"),
    [
        ((8, 1, 3, 3), {"groups": 8, "dilation": 2}),
        ((16, 1, 3, 3), {"groups": 8}),
        ((8, 2, 3, 3), {"groups": 4}),
        ((8, 1, 7, 7), {"groups": 8}),
        ((8, 1, 1, 1), {"groups": 8}),
        ((8, 8, 3, 3), {}),
    ],
)
def test_others_stay_convolutions(weight, settings) -> None:
    with torch.no_grad():
        joint = joint_of(lambda x, w: F.conv2d(x, w, **settings), [images(), torch.randn(weight).bfloat16()])
    assert count(joint, aten.convolution.default) == 1


def test_large_images_stay_the_librarys() -> None:
    with torch.no_grad():
        program, weight = lambda x, w: F.conv2d(x, w, groups=8), torch.randn(8, 1, 3, 3).bfloat16()
        found = [count(joint_of(program, [images(8, side), weight]), WINDOW_SUMS) for side in (160, 190)]
    assert found == [1, 0]


def test_with_gradients_they_stay_convolutions() -> None:
    inputs = [images().requires_grad_(), torch.randn(8, 1, 3, 3).bfloat16().requires_grad_()]
    joint = joint_of(lambda x, weight: F.conv2d(x, weight, groups=8), inputs)
    assert count(joint, aten.convolution.default) == 1


@pytest.mark.gpu
def test_depthwise_on_a_gpu() -> None:
    torch.manual_seed(0)
    layers: list[Any] = [
        torch.nn.Conv2d(16, 16, 3, 1, 1, groups=16),
        torch.nn.BatchNorm2d(16),
        torch.nn.Hardswish(),
    ]
    layers += [
        torch.nn.Conv2d(16, 16, 5, 2, 2, groups=16, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
    ]
    model, x = torch.nn.Sequential(*layers).cuda().eval(), torch.randn(4, 16, 31, 30, device="cuda")
    compiled = gradsplit.compile(model, fullgraph=True)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found, plain = compiled(x), model(x)
    with torch.no_grad():
        true = model.double()(x.double())
    assert found.stride() == plain.stride()
    assert (found - true).norm() <= 2 * (plain - true).norm()
