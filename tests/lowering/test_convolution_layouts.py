"""On a GPU, convolutions of 16-bit images are traced channels-last; transposed is only at the borders of a network."""

from __future__ import annotations

import copy
import functools
import random
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.backends import aot_eager
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.lowering.decompositions.convolution_layouts import (
    convolution_backward,
    reads_memory_order,
    view,
)
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.options import parse_options
from gradsplit.compile_core.pipeline import compile_graph
from tests.autograd.compare_with_eager import assert_same, captured, fakes

aten = torch.ops.aten


def network(x, first, scale, shift, second):
    y = F.relu(F.batch_norm(F.conv2d(x, first, padding=1), None, None, scale, shift, True))
    return F.conv2d(y, second, stride=2) * 2


def transposes(device: str, dtype: torch.dtype, training: bool = False) -> int:
    with FakeTensorMode():
        x = torch.empty(2, 8, 16, 16, device=device, dtype=dtype)
        weights = [torch.empty(8, 8, 3, 3, device=device, dtype=dtype, requires_grad=training) for _ in "12"]
        norm = [torch.empty(8, device=device, requires_grad=training) for _ in "12"]
    arguments = [x, weights[0], *norm, weights[1]]
    joint = trace_joint(captured(network), arguments, decomposition_table(device))
    return sum(
        node.kwargs.get("memory_format") == torch.channels_last
        for node in joint.module.graph.find_nodes(op="call_function", target=aten.clone.default)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("training", "count"), [(False, 3), (True, 4)])
def test_only_what_comes_from_outside_is_transposed(training, count):
    """The input, the weights, the gradient that arrives; only a machine with cuDNN tells the layout of a result."""
    assert transposes("cuda", torch.bfloat16, training) == count


def test_other_devices_and_dtypes_stay_as_they_are():
    assert transposes("cpu", torch.bfloat16) == 0
    assert transposes("cuda", torch.float32) == 0


@pytest.mark.parametrize("size", [(2, -1), (60, 16), (2, 16, -1), (2, 4, 4, 30)])
def test_views_are_of_rows_of_pixels_as_in_eager(size):
    """The convolution's result is channels-last; the program sees none of that."""
    x, weight = torch.randn(2, 8, 5, 6).bfloat16(), torch.randn(16, 8, 3, 3).bfloat16()

    def viewed(x, weight):
        y = F.conv2d(x, weight, padding=1)
        rows = y.view(size)
        rows.mul_(2)
        return rows, y + 1

    module = trace_joint(captured(viewed), fakes([x, weight]), decomposition_table("cuda")).module
    for found, expected in zip(module(x, weight), viewed(x, weight), strict=True):
        assert_same(found, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "shape", [(2, 6, 2, 3), (1, 4, 3, 2), (4, 2, 1, 3), (6, 2, 2, 1), (2, 1, 3, 4), (3, 4, 1, 1)]
)
def test_only_views_that_the_layout_does_not_have_are_copied(shape):
    images = torch.arange(prod(shape)).view(shape).contiguous(memory_format=torch.channels_last)
    sides = [side for side in range(1, prod(shape) + 1) if prod(shape) % side == 0]
    for size in product(sides, repeat=3):
        if prod(size) != prod(shape):
            continue
        try:
            images.view(size)
        except RuntimeError:
            assert torch.equal(view(images, size), images.reshape(size))
        else:
            assert view(images, size) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("convolve", "dims"), [(F.conv1d, 1), (F.conv2d, 2), (F.conv3d, 3), (F.conv_transpose2d, 2)]
)
def test_a_bias_is_added_after_the_convolution(convolve, dims, dtype):
    """So that what follows fuses with it: torch's kernels for GPUs add it in a kernel of its own."""
    x, weight = torch.randn(2, 4, *[6] * dims).to(dtype), torch.randn(4, 4, *[3] * dims).to(dtype)
    bias = torch.randn(4).to(dtype).requires_grad_()

    def biased(x, weight, bias):
        return convolve(x, weight, bias, stride=2) * 2

    arguments = [x, weight, bias]
    joint = trace_joint(captured(biased), fakes(arguments), decomposition_table("cuda"))
    calls = joint.module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert [call.args[2] for call in calls] == [None]
    with torch.no_grad():
        expected = biased(*arguments)
        result, grad_bias = joint.module(*arguments, tangent := torch.randn_like(expected))
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    assert_same(result, expected, atol=tolerance, rtol=tolerance)
    # Some versions of torch add up bfloat16 in bfloat16 here.
    exact = tangent.double().mul(2).movedim(1, 0).flatten(1)
    allowed = torch.finfo(dtype).eps * exact.abs().sum(1)
    assert ((grad_bias.double() - exact.sum(1)).abs() <= allowed).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", list(product([False, True], repeat=3))[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_is_a_sum(dtype, mask, transposed):
    x, weight = torch.randn(2, 4, 9, 8).to(dtype), torch.randn(4, 4, 3, 3).to(dtype)
    rest = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    gradient = torch.randn(2, 4, 9, 8).to(dtype)
    expected = aten.convolution_backward(gradient, x, weight, [4], *rest, mask)
    with torch.profiler.profile(acc_events=True) as profile:
        found = convolution_backward(gradient, x, weight, [4], *rest, mask)
    calls = sum(event.name == "aten::convolution_backward" for event in profile.events())
    assert calls == (found is not NotImplemented and any(mask[:2]))
    assert (found is NotImplemented) == (not mask[2] and dtype is torch.float32)
    if found is not NotImplemented:
        for own, eager, is_wanted in zip(found, expected, mask, strict=True):
            assert (own is not None) == is_wanted
            if is_wanted:
                torch.testing.assert_close(own, eager, atol=0.1, rtol=0.02)


def compiled_as_on_a_gpu(program, keeps_data=False):
    backend = RegionBackend(
        "as_on_a_gpu", aot_eager.compile_region, lambda device, options: decomposition_table("cuda")
    )
    options = parse_options(None, {"fallback_random": True})
    compile_captured = functools.partial(compile_graph, backend=backend, options=options)
    return CompiledFunction(program, compile_captured, data_ends=DataEnds(True) if keeps_data else None)


def _tokens(x):
    return F.dropout(x.flatten(2).transpose(1, 2) * 2, 0.5)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: F.dropout(x, 0.5),
        _tokens,
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.25)),
        lambda x: (x * 2).as_strided((2, 10), (7, 3), 1),
        lambda x: x.clone().resize_(3, 5),
    ],
)
def test_what_goes_by_the_order_of_memory_finds_eagers(read):
    """Masks of torch's random numbers under ``fallback_random``, and places in memory that the program names."""

    def program(x, weight):
        return read(F.conv2d(x, weight, padding=1))

    x, weight = (torch.randn(shape).bfloat16() for shape in ((2, 8, 6, 5), (16, 8, 3, 3)))
    compiled = compiled_as_on_a_gpu(program)
    torch.manual_seed(0)
    expected = program(x, weight)
    torch.manual_seed(0)
    assert_same(compiled(x, weight), expected, atol=0.1, rtol=0.05)


def test_sizes_that_depend_on_data_lie_in_no_order_of_memory():
    """Nor is it a condition whether one of them is one."""

    def program(x, weight):
        y = F.conv2d(x, weight, padding=1).flatten(1)
        return y.sum(), y[:, :240][x.flatten(1) > 0] * 2

    x, weight = (torch.randn(shape).bfloat16() for shape in ((2, 8, 6, 5), (16, 8, 3, 3)))
    compiled = compiled_as_on_a_gpu(program, keeps_data=True)
    expected = program(x, weight)
    for found, wanted in zip(compiled(x, weight), expected, strict=True):
        assert_same(found, wanted, atol=0.5, rtol=0.05)
    assert not compiled.break_reasons


AFTER_A_CONVOLUTION = [
    lambda y: y.flatten(1),
    lambda y: y.flatten(2).transpose(1, 2),
    lambda y: y.permute(0, 2, 3, 1),
    lambda y: y.reshape(-1)[3:99],
    lambda y: y.contiguous().view(y.shape[0], -1),
    lambda y: y.as_strided((2, 3, 4), (5, 2, 1), 1),
    lambda y: y.clone().resize_(3, 4),
    lambda y: F.dropout(y, 0.3),
    lambda y: torch.feature_dropout(y, 0.5, True),
    lambda y: y * torch.randn_like(y),
    lambda y: torch.empty_like(y).normal_() + y,
    lambda y: y.chunk(2, 1)[1],
    lambda y: torch.cat([y, y * 2], 1),
    lambda y: y.unfold(-1, 2, 1),
    lambda y: F.pixel_shuffle(y, 2),
    lambda y: y.flip(1).cumsum(1),
    lambda y: y[..., 1:],
    lambda y: F.interpolate(y, scale_factor=2.0, mode="bilinear"),
    lambda y: F.avg_pool2d(y, 3, 1, 1),
    lambda y: F.max_pool2d(y, 2),
    lambda y: F.group_norm(y, 2),
    lambda y: F.unfold(y, 2),
]


def test_random_programs_after_a_convolution():
    """Values, and sizes where memory is read, are eager's whatever follows."""
    compared = 0
    for seed in range(120):
        chooser = random.Random(seed)
        chosen = chooser.choices(AFTER_A_CONVOLUTION, k=chooser.randint(1, 4))

        def program(x, weight, chosen=tuple(chosen)):
            return functools.reduce(lambda y, change: change(y), chosen, F.conv2d(x, weight, padding=1))

        generator = torch.Generator().manual_seed(seed)
        inputs = [
            torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 8, 6, 5), (16, 8, 3, 3))
        ]
        torch.manual_seed(seed)
        try:
            expected = program(*inputs)
        except (RuntimeError, IndexError):
            continue  # there is no such program
        torch.manual_seed(seed)
        found = compiled_as_on_a_gpu(program)(*inputs)
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found, expected, atol=0.03 * largest + 0.02, rtol=0.03)
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("read", [lambda y: y.as_strided((2, 10), (7, 3), 1), lambda y: F.dropout(y, 0.5)])
def test_so_it_does_after_frozen_convolutions(read):
    layer, x = nn.Conv2d(8, 16, 3), torch.randn(2, 8, 6, 5)

    def program(x):
        return read(layer(x).relu())

    compiled = gradsplit.compile(program, options={"freezing": True, "fallback_random": True})
    with torch.no_grad():
        torch.manual_seed(0)
        expected = program(x)
        torch.manual_seed(0)
        assert_same(compiled(x), expected, atol=1e-5, rtol=1e-5)


def test_layouts_stay_for_what_asks_for_no_order():
    def program(x, weight):
        return F.conv2d(x, weight).relu() * x.new_empty(2, 1, 1, 1).bernoulli_(0.5)

    inputs = [torch.randn(2, 8, 6, 5).bfloat16(), torch.randn(16, 8, 3, 3).bfloat16()]
    graph = trace_joint(captured(program), fakes(inputs), decomposition_table("cuda")).module.graph
    assert not reads_memory_order(graph, False)
    (convolution,) = graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert not convolution.meta["val"].is_contiguous()


@pytest.mark.gpu
def test_masks_of_dropout_after_a_convolution_are_eagers():
    layer = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Dropout(0.5)).cuda()
    x = torch.randn(4, 8, 12, 12, device="cuda")
    compiled = gradsplit.compile(layer, options={"fallback_random": True})
    with torch.autocast("cuda", torch.bfloat16):
        torch.manual_seed(0)
        expected = layer(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x) == 0, expected == 0)


@pytest.mark.gpu
def test_results_and_gradients_keep_errors_and_strides():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
        nn.ConvTranspose2d(32, 8, 2, stride=2),
    ).cuda()  # fmt: skip
    x = torch.randn(4, 3, 20, 20, device="cuda")
    exact = copy.deepcopy(plain).double()
    compiled = gradsplit.compile(copy.deepcopy(plain), fullgraph=True)
    runs = []
    for module, cast in ((exact, False), (plain, True), (compiled, True)):
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            result = module(x if cast else x.double())
        result.float().square().mean().backward()
        runs.append([result.detach(), *(parameter.grad for parameter in module.parameters())])
    for true, eager, found in zip(*runs, strict=True):
        assert found.stride() == eager.stride()
        error = (found.double() - true).norm() / true.norm().clamp(min=1e-9)
        eager_error = (eager.double() - true).norm() / true.norm().clamp(min=1e-9)
        assert error <= 2 * eager_error + 1e-3
