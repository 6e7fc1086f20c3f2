"""C++ kernels against the reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import SCALAR_OPERATIONS, Gather
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import generate_cpp
from tests.lowering.codegen_nests import (
    BOOL,
    CPU,
    F32,
    F64,
    HAND_WRITTEN,
    I64,
    Case,
    NestBuilder,
    column_sums,
    elements_added,
    embedding,
    gather_elements,
    inputs_for,
    layer_norm,
    rows_added,
    softmax,
    total,
)
from tests.lowering.codegen_operations import OPERATIONS, PREDICATES, operands_for
from tests.lowering.codegen_random import random_cases
from tests.lowering.compare_nests import compare_buffers
from tests.lowering.loop_evaluator import evaluate_nest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def named_sources(cases: Iterable[tuple[str, Case]]) -> dict[str, KernelSource]:
    return {name: generate_cpp(replace(nest, name=name), buffers) for name, (nest, buffers) in cases}


@pytest.fixture(scope="module")
def hand_written(folder: Path):
    sources = named_sources(HAND_WRITTEN.items())
    return sources, build(list(sources.values()), folder)


def check(
    case: Case, source: KernelSource, function, storages: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    expected = evaluate_nest(case[0], storages)
    function(*(storages[name] for name in source.buffers))
    compare_buffers(case, storages, expected, tolerance, source.text)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_nests(name: str, hand_written) -> None:
    sources, functions = hand_written
    tolerance = 1e-4 if "many_rows" in name else 1e-5
    check(HAND_WRITTEN[name], sources[name], functions[name], inputs_for(HAND_WRITTEN[name]), tolerance)


def test_results_do_not_depend_on_the_number_of_threads(folder: Path) -> None:
    cases = {
        "total": total((700, 999)),
        "columns": column_sums(9000, 65),
        "layer_norm": layer_norm(300, 999),
        "rows": rows_added(9000, 900, 65),
        "elements": elements_added(300, 900),
    }
    sources = named_sources(cases.items())
    functions = build(list(sources.values()), folder)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append({name: inputs_for(case) for name, case in cases.items()})
            for name, source in sources.items():
                check(cases[name], source, functions[name], results[-1][name], 1e-3)
    finally:
        torch.set_num_threads(threads)
    for name in cases:
        for other in results[1:]:
            for buffer, tensor in results[0][name].items():
                assert torch.equal(tensor, other[name][buffer])


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extrema_in_memory(reduction: str, folder: Path) -> None:
    case = rows_added(reduction=reduction)
    source = generate_cpp(*case)
    storages = inputs_for(case)
    storages["table"][5] = storages["y"][30] = float("nan")
    check(case, source, build([source], folder)[source.name], storages)


def test_every_scalar_operation(folder: Path) -> None:
    sources = named_sources((name, case) for name, (_, case) in OPERATIONS.items())
    functions = build(list(sources.values()), folder)
    for name, (operation, case) in OPERATIONS.items():
        check(case, sources[name], functions[name], operands_for(operation, case))


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases=st.lists(random_cases(), min_size=10, max_size=12))
def test_random_nests(cases: list[Case], folder: Path) -> None:
    named = {f"random_{k}": case for k, case in enumerate(cases)}
    sources = named_sources(named.items())
    functions = build(list(sources.values()), folder)
    for name, case in named.items():
        check(case, sources[name], functions[name], inputs_for(case), 1e-4)


@pytest.mark.parametrize(
    "case",
    [embedding(), gather_elements(), rows_added(), elements_added()],
    ids=["rows", "elements", "rows added", "elements added"],
)
@pytest.mark.parametrize("index", [10**12, -(10**12), 17, -18])
def test_index_out_of_range_raises(case: Case, index: int, folder: Path) -> None:
    source = generate_cpp(*case)
    function = build([source], folder)[source.name]
    storages = inputs_for(case)
    storages["index"][5] = index
    with pytest.raises(IndexError, match="out of range"):
        function(*(storages[name] for name in source.buffers))
    storages["index"][5] = -1
    check(case, source, function, storages)


def test_an_unused_index_may_be_out_of_range(folder: Path) -> None:
    b = NestBuilder((4,))
    b.buffer("index", (4,), I64)
    b.buffer("x", (3,))
    b.buffer("y", (4,))
    index = b.load("index", (0,))
    valid = b.apply("ne", index, b.constant(-100, I64))
    b.store("y", (0,), b.load("x", (None,), mask=valid, other=7.0, gathers=(Gather(index, 1, 3),)))
    case = b.nest("masked_gather"), b.buffers
    source = generate_cpp(*case)
    storages = inputs_for(case)
    storages["index"][:] = torch.tensor([0, -100, 2, -3])
    check(case, source, build([source], folder)[source.name], storages)


def test_nothing_to_do_and_empty_reductions(folder: Path) -> None:
    cases = {"no_rows": layer_norm(0, 5), "no_columns": column_sums(0, 7), "empty_total": total((0, 3))}
    sources = named_sources(cases.items())
    functions = build(list(sources.values()), folder)
    for name, case in cases.items():
        check(case, sources[name], functions[name], inputs_for(case))


def test_in_place_normalisation(folder: Path) -> None:
    """A buffer that is read by every pass and written by the last."""
    b = NestBuilder((3, 40), 1)
    b.buffer("x", (3, 40))
    x = b.load("x", (0, 1))
    b.store("x", (0, 1), b.apply("sub", x, b.apply("mul", b.reduce("sum", x), b.constant(1 / 40))))
    case = b.nest("centre"), b.buffers
    source = generate_cpp(*case)
    check(case, source, build([source], folder)[source.name], inputs_for(case))


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
        source = generate_cpp(*case)
        storages = inputs_for(case)
        storages["x"][3] = float("nan")
        storages["x"][60:100] = -float("inf")
        storages["x"][110] = float("inf")
        check(case, source, build([source], folder)[source.name], storages)


def test_long_sums_are_as_accurate_as_eager(folder: Path) -> None:
    case = total((1 << 21,))
    source = generate_cpp(*case)
    storages = {"x": torch.rand(1 << 21), "y": torch.zeros(1)}
    exact = storages["x"].double().sum()
    build([source], folder)[source.name](storages["x"], storages["y"])
    eager_error = (storages["x"].sum().double() - exact).abs()
    assert (storages["y"].double() - exact).abs() <= max(eager_error, exact * 2**-24)


@pytest.mark.parametrize("length", [357, 4000, 100_000])
def test_a_sum_of_all_elements_is_vectorised(length: int, folder: Path) -> None:
    """One sum after another is slow and, of equal numbers, far from exact."""
    case = total((length,))
    source = generate_cpp(*case)
    x, y = torch.full((length,), 2.3226578), torch.zeros(1)
    build([source], folder)[source.name](x, y)
    exact, one_by_one = x.double().sum(), numpy.cumsum(x.numpy())[-1]
    assert (y.double() - exact).abs() <= abs(float(one_by_one) - exact) / 4


_OF_FLOATS = {
    operation: arguments
    for operation, arguments in SCALAR_OPERATIONS.items()
    if f"{operation}_float32" in OPERATIONS and operation not in PREDICATES
}


def _added(operation: str, number: int, rows: int, columns: int) -> Case:
    """The sums over rows of an operation's results."""
    b = NestBuilder((columns, rows), 1)
    names = [f"x{k}" for k in range(_OF_FLOATS[operation])]
    chosen = [b.constant(True, BOOL)] if operation == "where" else []
    for name in names[len(chosen) :]:
        b.buffer(name, (rows, columns))
    values = [b.load(name, (1, 0)) for name in names[len(chosen) :]]
    b.buffer("y", (columns,))
    value = b.apply("cast", b.apply(operation, *chosen, *values), dtype=F32)
    b.store("y", (0,), b.reduce("sum", value))
    return b.nest(f"added_{number}_{rows}_{columns}"), b.buffers


def test_sums_of_equal_numbers_are_exact_to_the_last_digits(folder: Path) -> None:
    """Whatever functions a loop calls, and however the numbers lie."""
    sizes = [(4096, 1), (4096, 40)]
    cases = {
        (operation, size): _added(operation, number, *size)
        for number, operation in enumerate(_OF_FLOATS)
        for size in [(1, 1), *sizes]
    }
    sources = {key: generate_cpp(*case) for key, case in cases.items()}
    functions = build(list(sources.values()), folder)
    wrong = []
    for operation in _OF_FLOATS:
        for number in (0.1, 0.3, 0.813, 1.94):

            def added(
                size: tuple[int, int], operation: str = operation, number: float = number
            ) -> torch.Tensor:
                source, specs = sources[operation, size], cases[operation, size][1]
                storages = {name: torch.full(spec.shape, number) for name, spec in specs.items()}
                functions[source.name](*(storages[name] for name in source.buffers))
                return storages["y"].double()

            one = added((1, 1))
            off = max(((added(size) / size[0] - one) / one).abs().max().item() for size in sizes)
            if one.isfinite().all() and one.all() and off > 1.2e-6:
                wrong.append(f"{operation} of {number}: {off:.1e}")
    assert not wrong, wrong


def test_kernels_take_tensors_or_addresses(folder: Path) -> None:
    case = softmax(4, 9)
    source = generate_cpp(*case)
    function = build([source], folder)[source.name]
    first, second = inputs_for(case), inputs_for(case)
    function(*(first[name] for name in source.buffers))
    function(*(second[name].data_ptr() for name in source.buffers))
    assert torch.equal(first["y"], second["y"])
    with pytest.raises(TypeError, match="one tensor or address"):
        function(first["x"])
    with pytest.raises(AttributeError):
        function(first["x"], "y")


def test_unsupported_dtypes_and_devices() -> None:
    b = NestBuilder((4,))
    b.buffer("x", (4,), torch.complex64)
    b.store("x", (0,), b.constant(1.0))
    with pytest.raises(Unsupported, match="complex64"):
        generate_cpp(b.nest("complex"), b.buffers)
    b = NestBuilder((4,))
    b.buffer("x", (4,))
    b.buffers["x"] = replace(b.buffers["x"], device=torch.device("meta"))
    b.store("x", (0,), b.constant(1.0))
    with pytest.raises(Unsupported, match="meta"):
        generate(b.nest("meta"), b.buffers)


_FUNCTIONS = {
    # function -> bound in ulp
    "exp": 1.5, "exp2": 1.5, "expm1": 2.0, "log": 1.5, "log2": 2.0, "log10": 2.0, "log1p": 1.5,
    "sigmoid": 3.0, "tanh": 3.0, "erf": 2.0, "sin": 2.0, "cos": 2.0,
}  # fmt: skip


def test_float32_functions_within_their_bounds(folder: Path) -> None:
    """Every 4001st float of all, and dense ranges where results are near 0, 1 or the ends of their range."""
    bits = torch.arange(-(2**31), 2**31, 4001).to(torch.int32).view(F32)
    dense = [
        torch.linspace(*ends, 200_003)
        for ends in ((-20, 20), (-1.5, 1.5), (0.3, 3), (-110, 100), (-1e-3, 1e-3))
    ]
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 2.0**-149, 2.0**-126]
    )
    x = torch.cat([bits, *dense, special])
    cases = {}
    for function in _FUNCTIONS:
        b = NestBuilder((x.numel(),))
        b.buffer("x", (x.numel(),))
        b.buffer("y", (x.numel(),))
        b.store("y", (0,), b.apply(function, b.load("x", (0,))))
        cases[function] = b.nest(function), b.buffers
    sources = named_sources(cases.items())
    functions = build(list(sources.values()), folder)
    for function, bound in _FUNCTIONS.items():
        y = torch.empty_like(x)
        functions[function](x, y)
        exact = getattr(torch, function)(x.double())
        known = torch.ones_like(x, dtype=torch.bool)
        if function == "sigmoid":  # eager's formula, too, gives 0 below the least normal number
            known = ~(exact < 2.0**-126) | (y == 0)
            exact = torch.where(exact < 2.0**-126, 0.0, exact)
        same = (y == exact.float()) | (y.isnan() & exact.isnan())
        ulp = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact)[1] - 24).clamp(min=-149))
        error = torch.where(same, 0.0, (y.double() - exact).abs() / ulp)
        worst = torch.where(known, error, 0.0).nan_to_num(nan=1e9).argmax()
        assert error[worst] <= bound, f"{function}({x[worst]!r}) = {y[worst]!r}, not {exact[worst]!r}"
        assert torch.signbit(y[x == 0]).tolist() == torch.signbit(exact[x == 0].float()).tolist()


def test_all_float16_and_bfloat16_conversions(folder: Path) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    wide = torch.cat(
        [torch.arange(-(2**31), 2**31, 9973).to(torch.int32).view(F32), torch.linspace(-7e4, 7e4, 100_001)]
    )
    for narrow in (torch.float16, torch.bfloat16):
        for source_tensor, target in ((every.view(narrow), F32), (wide, narrow)):
            b = NestBuilder((source_tensor.numel(),))
            b.buffer("x", tuple(source_tensor.shape), source_tensor.dtype)
            b.buffer("y", tuple(source_tensor.shape), target)
            b.store("y", (0,), b.load("x", (0,)))
            source = generate_cpp(b.nest("convert"), b.buffers)
            result = torch.empty(source_tensor.shape, dtype=target)
            build([source], folder)["convert"](source_tensor, result)
            torch.testing.assert_close(result, source_tensor.to(target), rtol=0, atol=0, equal_nan=True)


def test_reads_through_strides_and_offsets(folder: Path) -> None:
    """Negative strides, gaps, and an offset, as views make them."""
    b = NestBuilder((6, 10))
    b.buffer("x", (200,))
    b.buffer("y", (6, 10))
    access = replace(b.access("x", (None,)), strides=(20, -2), offset=60)
    b.body.append(_load(access))
    b.store("y", (0, 1), len(b.body) - 1)
    case = b.nest("strided"), b.buffers
    source = generate_cpp(*case)
    check(case, source, build([source], folder)[source.name], inputs_for(case))


def _load(access):
    from gradsplit.compile_core.ir.loops import Load

    return Load(access, F32)


def test_constants_keep_their_values(folder: Path) -> None:
    values = [0.1, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028234663852886e38]
    for dtype in (F32, F64):
        b = NestBuilder(())
        for k, value in enumerate(values):
            b.buffer(f"y{k}", (), dtype)
            b.store(f"y{k}", (), b.constant(value, dtype))
        source = generate_cpp(b.nest("constants"), b.buffers)
        results = [torch.zeros(1, dtype=dtype, device=CPU) for _ in values]
        build([source], folder)["constants"](*results)
        for result, value in zip(results, values, strict=True):
            torch.testing.assert_close(
                result, torch.tensor([value], dtype=dtype), rtol=0, atol=0, equal_nan=True
            )
    b = NestBuilder(())
    b.buffer("y", (), I64)
    b.buffer("z", (), BOOL)
    b.store("y", (), b.constant(-(2**63), I64))
    b.store("z", (), b.constant(True, BOOL))
    source = generate_cpp(b.nest("integers"), b.buffers)
    whole, truth = torch.zeros(1, dtype=I64), torch.zeros(1, dtype=BOOL)
    build([source], folder)["integers"](whole, truth)
    assert (whole.item(), truth.item()) == (-(2**63), True)


def test_truth_values_are_indices(folder: Path) -> None:
    b = NestBuilder((37,))
    b.buffer("chosen", (37,), torch.uint8)
    b.buffer("x", (2,), torch.uint8)
    b.buffer("y", (37,), torch.uint8)
    truth = b.apply("ne", b.load("chosen", (0,)), b.constant(0, torch.uint8))
    index = b.apply("cast", truth, dtype=I64)
    b.store("y", (0,), b.load("x", (None,), gathers=(Gather(index, 1, 2),)))
    case = b.nest("chosen_by_truth"), b.buffers
    source = generate_cpp(*case)
    check(case, source, build([source], folder)[source.name], inputs_for(case))


def test_powers_of_integers_wrap(folder: Path) -> None:
    b = NestBuilder((40,))
    for name in ("x", "y", "z"):
        b.buffer(name, (40,), I64)
    base = b.apply("abs", b.load("x", (0,)))
    power = b.apply("pow", base, b.load("y", (0,)))
    b.store("z", (0,), b.apply("fmod", power, b.constant(-3, I64)))
    case = b.nest("powers"), b.buffers
    source = generate_cpp(*case)
    storages = {"x": torch.arange(-20, 20) * 5, "y": torch.arange(40) + 7, "z": torch.zeros(40, dtype=I64)}
    check(case, source, build([source], folder)[source.name], storages)


def test_integers_wrap(folder: Path) -> None:
    """The least one has no absolute value, and one more than the greatest is less."""
    b = NestBuilder((3,))
    for name in ("x", "y", "z"):
        b.buffer(name, (3,), I64)
    x = b.load("x", (0,))
    b.store("y", (0,), b.apply("remainder", b.apply("abs", x), b.constant(3, I64)))
    is_less = b.apply("lt", b.apply("add", x, b.constant(1, I64)), x)
    b.store("z", (0,), b.apply("where", is_less, b.constant(1, I64), b.constant(0, I64)))
    source = generate_cpp(b.nest("wrapping"), b.buffers)
    limits = torch.iinfo(I64)
    x, y, z = torch.tensor([limits.min, -4, limits.max]), torch.zeros(3, dtype=I64), torch.zeros(3, dtype=I64)
    build([source], folder)[source.name](*({"x": x, "y": y, "z": z}[name] for name in source.buffers))
    assert y.tolist() == (x.abs() % 3).tolist()
    assert z.tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_numbers_that_an_integer_does_not_hold(dtype: torch.dtype) -> None:
    """Also where a compiler knows them."""
    wide = [300.7, -300.7, 70000.0, 3000000077.0, -3000000077.0, 1e19, math.inf, -math.inf, math.nan]

    def program(x: torch.Tensor, nothing: torch.Tensor) -> list[torch.Tensor]:
        constants = [torch.tensor(number, dtype=torch.float64) for number in wide]
        constants += [torch.full((20,), number).float() * 1.5 for number in wide]
        return [value.to(dtype) for value in (x, x.float(), nothing.mean(), *constants)]

    arguments = torch.tensor(wide * 9, dtype=torch.float64), torch.zeros(0)
    for found, expected in zip(
        gradsplit.compile(program, fullgraph=True)(*arguments), program(*arguments), strict=True
    ):
        assert torch.equal(found, expected)


def test_integers_of_negative_fractions_are_zeros_without_a_sign() -> None:
    x = torch.tensor([-0.3, 0.0, -1.5, 2.5] * 9)
    found = gradsplit.compile(lambda x: x.long().reciprocal(), fullgraph=True)(x)
    assert torch.equal(found, x.long().reciprocal())


def test_spilled_vectors_are_aligned() -> None:
    """A compiler's bug, in a kernel without calls whose sum over checked gathers spills vectors."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.23, 0.078], dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 1, 5, dtype=torch.float64)

    def loss(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (torch.nanquantile(x, q, dim=0, keepdim=True) * weights).sum()

    found = torch.autograd.grad(gradsplit.compile(loss)(x, q), (x, q))
    torch.testing.assert_close(found, torch.autograd.grad(loss(x, q), (x, q)))
