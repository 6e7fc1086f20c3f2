"""Convolutions that cut images into patches are products: the numbers, strides and gradients are a convolution's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from tests.autograd.compare_with_eager import captured, fakes
from tests.lowering.test_convolution_layouts import compiled_as_on_a_gpu

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def joint_of(program: Any, inputs: list[Tensor]) -> torch.fx.GraphModule:
    return trace_joint(captured(program), fakes(inputs), decomposition_table("cuda")).module


def count(module: torch.fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in module.graph.nodes)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("shape", "window", "filters"),
    [
        ((2, 3, 32, 48), (16, 16), 24),
        ((2, 8, 8, 12), (2, 2), 16),
        ((3, 5, 6, 9), (3, 3), 7),
        ((2, 4, 6, 8), (2, 4), 8),
    ],
)
def test_values_strides_and_gradients(shape, window, filters, layout) -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x * 1.5, weight, bias, stride=window) * 2

    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16().contiguous(memory_format=layout)
    inputs = [x, torch.randn(filters, shape[1], *window).bfloat16(), torch.randn(filters).bfloat16()]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    tangent = torch.randn_like(program(*inputs).detach())
    for given in (inputs, exact):
        result = program(*given)
        results.append((result, *torch.autograd.grad(result, given, tangent.to(result.dtype))))
    joint = joint_of(program, inputs)
    assert count(joint, *_CONVOLUTIONS) == 0 and count(joint, aten.mm.default) == 3
    with torch.no_grad():
        found = joint(*inputs, tangent)
    assert found[0].stride() == results[0][0].stride()
    for mine, plain, true in zip(found, *results, strict=True):
        # The bias is added to a result that was rounded, as in torch's kernels for GPUs.
        assert (mine - true).norm() <= 1.6 * (plain - true).norm()


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ((2, 8, 9, 8), {"stride": 2}),
        ((2, 8, 8, 8), {"stride": 1}),
        ((2, 8, 8, 8), {"stride": 2, "padding": 1}),
        ((2, 8, 8, 8), {"stride": 2, "dilation": 2}),
        ((2, 16, 8, 8), {"stride": 2, "groups": 2}),
    ],
)
def test_others_stay_convolutions(size, settings) -> None:
    inputs = [torch.randn(size).bfloat16(), torch.randn(8, 8, 2, 2).bfloat16()]
    joint = joint_of(lambda x, weight: F.conv2d(x, weight, **settings), inputs)
    assert count(joint, aten.convolution.default) == 1


def test_weights_that_lie_channels_last_stay_as_they_are() -> None:
    weight = torch.randn(8, 8, 2, 2).bfloat16().contiguous(memory_format=torch.channels_last)
    joint = joint_of(
        lambda x, weight: F.conv2d(x, weight, stride=2), [torch.randn(2, 8, 8, 8).bfloat16(), weight]
    )
    assert count(joint, aten.convolution.default) == 1


@pytest.mark.parametrize(
    "read", [lambda y: F.dropout(y, 0.5), lambda y: y.as_strided((2, 10), (7, 3), 1), lambda y: y.view(2, -1)]
)
def test_what_reads_the_order_of_memory_finds_eagers(read) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return read(F.conv2d(x, weight, stride=2) * 2)

    inputs = [torch.randn(2, 8, 6, 4).bfloat16(), torch.randn(16, 8, 2, 2).bfloat16()]
    results = []
    for call in (program, compiled_as_on_a_gpu(program)):
        torch.manual_seed(0)
        results.append(call(*inputs))
    torch.testing.assert_close(*results, atol=0.2, rtol=0.05)
    assert torch.equal(*(result == 0 for result in results))


def test_an_open_number_of_images() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=4).flatten(2).transpose(1, 2)

    weight = torch.randn(16, 3, 4, 4).bfloat16()
    compiled = compiled_as_on_a_gpu(program)
    for images in (2, 3, 5):
        x = torch.randn(images, 3, 8, 12).bfloat16()
        torch.testing.assert_close(compiled(x, weight), program(x, weight), atol=0.1, rtol=0.05)


@pytest.mark.gpu
def test_patches_on_a_gpu() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 4, 4), torch.nn.GELU(), torch.nn.Conv2d(64, 32, 2, 2))
    layer, x = layer.cuda(), torch.randn(4, 3, 64, 48, device="cuda")
    compiled = gradsplit.compile(layer, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        found, plain = compiled(x), layer(x)
    true = layer.double()(x.double())
    assert found.stride() == plain.stride()
    assert (found - true).norm() <= 2 * (plain - true).norm()
