"""Triton kernels in Triton's interpreter, on CPU tensors, against the reference evaluator.

Not collected by itself: the interpreter is chosen by an environment variable before Triton is imported, so
``test_codegen_triton.py`` runs this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.ir.pooling import GRADIENT, MAX_POOL, WINDOW_SUMS
from gradsplit.compile_core.lowering.build import generate
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.tiling.one_walk_variances import one_walk_variances
from gradsplit.compile_core.lowering.tiling.tiling_split import split_nest, split_reductions
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from tests.lowering import convolution_programs
from tests.lowering.band_programs import inputs_of, norm_backward
from tests.lowering.codegen_nests import (
    HAND_WRITTEN,
    Case,
    NestBuilder,
    channel_variances,
    columns_of_parts,
    embedding,
    inputs_for,
    rows_added,
    softmax,
    total,
)
from tests.lowering.codegen_operations import OPERATIONS, operands_for, operation_case
from tests.lowering.codegen_random import random_cases
from tests.lowering.compare_nests import compare_buffers
from tests.lowering.interpreted_kernels import interpreted, link_interpreted
from tests.lowering.loop_evaluator import evaluate, evaluate_nest
from tests.lowering.lowering_harness import compare, compute_of, nests, trace
from tests.lowering.product_programs import on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def run(case: Case, storages: dict[str, torch.Tensor], folder: Path) -> str:
    source = generate_triton(*case)
    interpreted(source, folder)(*(storages[name] for name in source.buffers))
    return source.text


def check(case: Case, storages: dict[str, torch.Tensor], folder: Path, tolerance: float = 1e-5) -> None:
    expected = evaluate_nest(case[0], storages)
    text = run(case, storages, folder)
    compare_buffers(case, storages, expected, tolerance, text)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_nests(name: str, folder: Path) -> None:
    check(HAND_WRITTEN[name], inputs_for(HAND_WRITTEN[name]), folder, 1e-4 if "many_rows" in name else 1e-5)


def test_column_sums_that_load_ahead(folder: Path) -> None:
    case = columns_of_parts(128, 128, 51)
    check(case, inputs_for(case), folder)
    assert "num_stages" in generate_triton(*case).text


def test_wide_rows_with_numbers_of_their_own_are_summed_one_after_another(folder: Path) -> None:
    case = columns_of_parts(2, 8202, 65)
    exact = {name: values.round() for name, values in inputs_for(case).items()}
    check(case, exact, folder)
    text = generate_triton(*case).text
    assert "range(0, 65, 1)" in text and "if program % 9 < 8:" in text, "only a row's last block has a mask"
    nest, buffers = columns_of_parts(1, 8202, 2000)
    on_gpu = {name: replace(spec, device=torch.device("cuda")) for name, spec in buffers.items()}
    assert len(split_nest(nest, on_gpu)[0]) == 2, "nine programs would walk all rows"


def test_sums_that_are_taken_along_with_their_maxima(folder: Path) -> None:
    """Rows in which infinities and NaN come first, last, alone, or are all there is."""
    case = softmax(8, 20001)
    storages = inputs_for(case)
    rows = storages["x"].view(8, 20001)
    rows[0], rows[1, :9000], rows[2, 9000:] = -torch.inf, -torch.inf, -torch.inf
    rows[3, 20000], rows[4, 17], rows[5, 17], rows[6] = torch.inf, torch.inf, torch.nan, 3e38
    rows[7] = -torch.inf
    rows[7, 12345] = -5.0
    check(case, storages, folder)
    assert "tl.reshape" in generate_triton(*case).text, "one walk for both"


@pytest.mark.parametrize("name", OPERATIONS)
def test_scalar_operations(name: str, folder: Path) -> None:
    operation, case = OPERATIONS[name]
    check(case, operands_for(operation, case), folder)


@pytest.mark.parametrize(
    "operation", ["neg", "tanh", "expm1", "log1p", "sin", "erf", "round", "trunc", "ceil", "sqrt"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_have_their_signs(operation: str, dtype: torch.dtype, folder: Path) -> None:
    case = operation_case(operation, dtype)
    storages = operands_for(operation, case)
    run(case, storages, folder)
    expected = getattr(torch, operation)(storages["x0"])
    zeros = expected == 0
    assert zeros.any()
    torch.testing.assert_close(storages["y"][zeros].signbit(), expected[zeros].signbit())


def test_a_normal_distributions_function_loses_nothing_near_0(folder: Path) -> None:
    """Where the error function is near -1, their sum in float32 has no digit that is right."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-30])
    x = torch.cat([torch.linspace(-14, 14, 20000), special])
    b = NestBuilder((len(x),))
    b.buffer("x", tuple(x.shape))
    b.buffer("y", tuple(x.shape))
    b.store("y", (0,), b.apply("add", b.constant(1.0), b.apply("erf", b.load("x", (0,)))))
    case, storages = (b.nest("distribution"), b.buffers), {"x": x, "y": torch.empty_like(x)}
    assert "one_and_erf32" in run(case, storages, folder)
    expected = torch.special.erfc(-x.double())
    torch.testing.assert_close(storages["y"].double(), expected, rtol=0, atol=2.4e-7, equal_nan=True)
    near = (x < 0) & (x > -3)
    torch.testing.assert_close(storages["y"][near].double(), expected[near], rtol=2e-4, atol=0)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=random_cases())
def test_random_nests(case: Case, folder: Path) -> None:
    check(case, inputs_for(case), folder, 1e-4)


def test_nan_and_infinity_in_reductions(folder: Path) -> None:
    for name in (
        "extrema",
        "argmax",
        "argmin",
        "argmax_columns",
        "softmax_rows",
        "softmax_columns",
        "total_max",
    ):
        case = HAND_WRITTEN[name]
        storages = inputs_for(case)
        storages["x"][3] = float("nan")
        storages["x"][60:100] = -float("inf")
        storages["x"][110] = float("inf")
        check(case, storages, folder)


def test_an_index_out_of_range_reads_nan_and_nothing_else(folder: Path) -> None:
    case = embedding()
    storages = inputs_for(case)
    storages["index"][5] = 10**12
    run(case, storages, folder)
    rows = storages["y"].view(11, 24)
    assert rows[5].isnan().all()
    assert not rows[:5].isnan().any()
    assert not rows[6:].isnan().any()


def test_an_index_out_of_range_adds_nothing(folder: Path) -> None:
    case = rows_added()
    storages = inputs_for(case)
    storages["index"][5] = 10**12
    valid = {name: storage.clone() for name, storage in storages.items()}
    valid["index"][5] = 0
    valid["weight"][5] = 0
    run(case, storages, folder)
    torch.testing.assert_close(storages["y"], evaluate_nest(case[0], valid)["y"])


@pytest.mark.parametrize(("channels", "pixels"), [(6, 100), (6, 128), (33, 600), (32, 1024)])
def test_deviations(channels: int, pixels: int, folder: Path) -> None:
    """In tiles that hold all values and in such that loop, with and without an overhang; the first value is far off,
    and the mean is large beside the deviations."""
    nest, buffers = channel_variances(channels, pixels)
    storages = inputs_for((nest, buffers))
    storages["x"].add_(7)[:channels] = 500
    check((one_walk_variances(nest), buffers), storages, folder, 1e-4)


def test_nothing_to_do(folder: Path) -> None:
    check(total((0, 3)), inputs_for(total((0, 3))), folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_max_pooling(dtype: torch.dtype, folder: Path) -> None:
    """Windows that overlap, with padding, over sides of which one is no multiple of the step."""
    windows = ([3, 3], [2, 2], [1, 1])

    def pool(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = MAX_POOL(x, *windows, False)
        return values, places, GRADIENT(grad, places, *windows, x.shape[-2:])

    inputs = [torch.randint(5, (2, 3, *plane)).to(dtype) for plane in ((9, 12), (5, 6))]
    inputs = [tensor.to(memory_format=torch.channels_last) for tensor in inputs]
    program = fuse(lower(compute_of(trace(pool, *inputs))))
    sources = [generate_triton(nest, program.buffers) for nest in nests(program)]
    results = link_interpreted(program, sources, folder)([*inputs])
    compare(results, pool(*inputs), 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_window_sums(dtype: torch.dtype, folder: Path) -> None:
    """What is summed is computed once an element where it takes much, and in each window where it does not."""
    windows = ([3, 2], [1, 2], [2, 1])

    def pool(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return WINDOW_SUMS(x + 1, *windows), WINDOW_SUMS(((x * 2 + 1) * x - 3) * x - x / 2, *windows)

    x = torch.randint(5, (2, 3, 9, 12)).to(dtype).to(memory_format=torch.channels_last)
    program = fuse(lower(compute_of(trace(pool, x))))
    sources = [generate_triton(nest, program.buffers) for nest in nests(program)]
    compare(link_interpreted(program, sources, folder)([x]), pool(x), 0.0)


def test_weighted_window_sums(folder: Path) -> None:
    """Each sum is rounded, also for what is computed of it in the same kernel."""

    def sums(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = WINDOW_SUMS(x, [3, 3], [2, 1], [1, 1], weights)
        return first * 3, WINDOW_SUMS(torch.exp(x), [3, 3], [1, 1], [0, 2], weights)

    x = torch.randn(2, 3, 9, 12).bfloat16().to(memory_format=torch.channels_last)
    inputs = [x, torch.randn(3, 3, 3).bfloat16()]
    program = fuse(lower(compute_of(trace(sums, *inputs))))
    sources = [generate_triton(nest, program.buffers) for nest in nests(program)]
    compare(link_interpreted(program, sources, folder)([*inputs]), sums(*inputs))


@pytest.mark.parametrize("layout", convolution_programs.LAYOUTS)
def test_destinations_lie_as_the_caller_says(layout: torch.memory_format, folder: Path) -> None:
    inputs = convolution_programs.inputs(layout)
    expected = convolution_programs.weight_gradient(*inputs)
    for wanted in convolution_programs.LAYOUTS:
        place = torch.full_like(expected, torch.nan, memory_format=wanted)
        module = trace(convolution_programs.weight_gradient, *inputs)
        program = fuse(lower(compute_of(module, {"result_0": "place"}, {"result_0": place.stride()})))
        sources = [generate_triton(nest, program.buffers) for nest in nests(program)]
        (result,) = link_interpreted(program, sources, folder)([*inputs, place])
        assert result is place
        assert torch.equal(place, expected)


def test_column_sums_of_bands_of_rows(folder: Path) -> None:
    program = norm_backward()
    result = split_reductions(join_column_sums(on(torch.device("cuda", 0), program)))
    sources = [generate(step, result.buffers) for step in result.steps if not isinstance(step, ExternCall)]
    run = link_interpreted(result, sources, folder)
    inputs = inputs_of(program)
    compare(run([*inputs]), evaluate(program, inputs))
