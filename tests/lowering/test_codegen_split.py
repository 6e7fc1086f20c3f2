"""Reductions cut into two kernels mean what they meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradsplit.compile_core.ir.loops import Load, LoopNest, LoopProgram
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.ir.verify_loops import verify_nest
from gradsplit.compile_core.lowering.tiling.tiling_split import split_nest, split_reductions
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from tests.lowering.codegen_nests import (
    BOOL,
    F32,
    Case,
    NestBuilder,
    arg_extremum,
    batch_norm_statistics,
    channel_variances,
    column_sums,
    inputs_for,
    layer_norm,
    softmax,
    total,
    weighted_columns,
)
from tests.lowering.loop_evaluator import evaluate_nest

GPU = torch.device("cuda", 0)


def bias_gradient(rows: int = 5000, columns: int = 24) -> Case:
    """Several reductions of one pass, a store at every point, values that follow, a masked load."""
    b = NestBuilder((columns, rows), 1)
    b.buffer("x", (rows, columns))
    b.buffer("keep", (rows, columns), BOOL)
    b.buffer("scale", (columns,))
    b.buffer("scaled", (rows, columns))
    for name in ("sums", "largest"):
        b.buffer(name, (columns,))
    b.buffer("any", (columns,), BOOL)
    scale = b.load("scale", (0,))
    keep = b.load("keep", (1, 0))
    x = b.apply("mul", b.load("x", (1, 0), mask=keep, other=0.5), scale)
    b.store("scaled", (1, 0), x, mask=keep)
    b.store("sums", (0,), b.apply("add", b.reduce("sum", x), scale))
    b.store("largest", (0,), b.reduce("max", x))
    b.store("any", (0,), b.reduce("any", b.apply("gt", x, b.constant(6.0)), BOOL))
    return b.nest("bias_gradient"), b.buffers


def residual_gradient(rows: int = 20_000, channels: int = 16) -> Case:
    """Batch norm backward of a masked sum that is stored too: the second round had better read what was stored."""
    b = NestBuilder((channels, rows), 1)
    for name in ("first", "second", "relu", "x", "residual", "gradient"):
        b.buffer(name, (rows, channels), torch.bfloat16)
    summed = b.apply("add", b.load("first", (1, 0)), b.load("second", (1, 0)))
    positive = b.apply("gt", b.load("relu", (1, 0)), b.constant(0.0))
    residual = b.apply("where", positive, summed, b.constant(0.0), dtype=F32)
    b.store("residual", (1, 0), residual)
    rounded = b.apply("round_to", residual, parameter=torch.bfloat16)
    slope = b.apply("mul", b.reduce("sum", rounded), b.constant(1.0 / rows))
    b.store("gradient", (1, 0), b.apply("mul", b.apply("sub", rounded, slope), b.load("x", (1, 0))))
    return b.nest("residual_gradient"), b.buffers


def sums_of_planes(images: int = 4, side: int = 80, channels: int = 16) -> Case:
    """Sums over three axes that cannot be one, since the planes have borders."""
    b = NestBuilder((channels, images, side, side), 3)
    b.buffer("x", (images, side + 2, side + 2, channels), torch.bfloat16)
    b.buffer("sums", (channels,))
    inner = b.load("x", (1, 2, 3, 0), offset=(side + 3) * channels)
    b.store("sums", (0,), b.reduce("sum", inner))
    return b.nest("sums_of_planes"), b.buffers


def exponentials_and_sums(rows: int = 3, columns: int = 99_991) -> Case:
    """A store at every point along rows that no number of parts cuts evenly."""
    b = NestBuilder((rows, columns), 1)
    for name, shape in (("x", (rows, columns)), ("exponentials", (rows, columns)), ("sums", (rows,))):
        b.buffer(name, shape)
    value = b.apply("exp", b.load("x", (0, 1)))
    b.store("exponentials", (0, 1), value)
    b.store("sums", (0,), b.reduce("sum", value))
    return b.nest("exponentials_and_sums"), b.buffers


CASES = {
    "planes": sums_of_planes(),
    "exponentials_and_sums": exponentials_and_sums(),
    "residual_gradient": residual_gradient(),
    "columns": column_sums(4096, 70),
    "prime_rows": column_sums(7919, 12),
    "total": total((300, 701)),
    "total_max": total((300, 701), "max"),
    "total_prime": total((99991,)),
    "bias_gradient": bias_gradient(),
    "bias_gradient_prime": bias_gradient(4999, 23),
    "weighted_columns": weighted_columns(5000),
    "weighted_columns_prime": weighted_columns(4999, 23),
    "layer_norm_of_few_rows": layer_norm(3, 400_001),
    "centred_channels": batch_norm_statistics(40, 5, 6000),
    "variances": channel_variances(24, 8192, normalised=False),
    "variances_and_values": channel_variances(64, 16_384),
    "variances_prime": channel_variances(16, 99_991),
    "softmax_of_few_rows": softmax(4, 300_000),
}
# A layer norm: mean, variance, and the normalisation; each reduction in two.
NESTS = {
    "layer_norm_of_few_rows": 5,
    "centred_channels": 3,
    "softmax_of_few_rows": 5,
    "residual_gradient": 3,
    "planes": 3,
    "variances_and_values": 3,
    "variances_prime": 5,
}


def on_gpu(buffers: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: replace(spec, device=GPU) for name, spec in buffers.items()}


@pytest.mark.parametrize("name", CASES)
def test_two_nests_compute_what_one_did(name: str) -> None:
    nest, buffers = CASES[name]
    nests, partials = split_nest(nest, on_gpu(buffers))
    assert len(nests) == NESTS.get(name, 2)
    assert partials
    storages = inputs_for(CASES[name])
    expected = evaluate_nest(nest, storages)
    state = {**storages, **{n: torch.full((s.numel,), 7).to(s.dtype) for n, s in partials.items()}}
    for part in nests:
        verify_nest(part, {**on_gpu(buffers), **partials})
        state = evaluate_nest(part, state)
        assert generate_triton(part, {**on_gpu(buffers), **partials}).text
    for buffer in buffers:
        torch.testing.assert_close(state[buffer], expected[buffer], rtol=1e-5, atol=1e-4)


def test_a_later_round_reads_what_an_earlier_one_stored() -> None:
    nest, buffers = residual_gradient()
    *_, last = split_nest(nest, on_gpu(buffers))[0]
    loaded = {s.access.buffer for s in last.body if isinstance(s, Load)}
    assert {"residual", "x"} < loaded and not {"first", "second", "relu"} & loaded


def test_a_variance_takes_one_walk_where_parts_are_equal() -> None:
    def walks(pixels: int) -> int:
        nest, buffers = channel_variances(64, pixels)
        return sum(
            "x" in {s.access.buffer for s in part.body if isinstance(s, Load)}
            for part in split_nest(nest, on_gpu(buffers))[0]
        )

    assert (walks(16_384), walks(99_991)) == (2, 3)


def test_a_variance_in_parts_is_as_exact_as_in_one() -> None:
    """Parts whose means lie far apart, and a mean that is large beside the deviations."""
    nest, buffers = channel_variances(8, 65_536, normalised=False)
    nests, partials = split_nest(nest, on_gpu(buffers))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65_536, 8, generator=generator) + 100
    x[:4096] -= 300
    storages = inputs_for((nest, buffers)) | {"x": x.bfloat16().flatten()}
    state = {**storages, **{n: torch.full((s.numel,), 7.0) for n, s in partials.items()}}
    for part in nests:
        state = evaluate_nest(part, state)
    expected = storages["x"].double().view(-1, 8).var(0, correction=0)
    torch.testing.assert_close(state["variance"].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        layer_norm(8, 30_000),  # two rounds, but small
        column_sums(20, 100),  # small
        column_sums(64, 8192),  # parallel enough
        arg_extremum("argmax", 4, 50_000),
        channel_variances(512, 1024),  # short columns
        batch_norm_statistics(32, 8, 784),  # stores what follows at every point, but is small
    ],
    ids=["rounds", "small", "parallel", "positions", "short", "stores"],
)
def test_other_nests_stay_whole(case: Case) -> None:
    (whole,), partials = split_nest(case[0], on_gpu(case[1]))
    assert whole.extents == case[0].extents
    assert not partials


def test_nests_on_cpu_stay_whole() -> None:
    case = CASES["total"]
    assert split_nest(*case) == ((case[0],), {})


def test_a_program_gets_the_partial_buffers() -> None:
    nest, buffers = CASES["columns"]
    program = LoopProgram("p", ("x",), ("y",), on_gpu(buffers), {}, (nest,), ())
    split = split_reductions(program)
    assert [step.name for step in split.steps if isinstance(step, LoopNest)] == [
        "column_sums_partials",
        "column_sums",
    ]
    (added,) = set(split.buffers) - set(buffers)
    assert split.buffers[added].dtype == F32
    assert split.buffers[added].device == GPU
