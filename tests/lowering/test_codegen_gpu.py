"""Triton kernels on a GPU: what the interpreter cannot show, launches, alignment, streams and libdevice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import BandNest, ExternCall, LoopNest
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.tiling.tiling_split import split_nest, split_reductions
from gradsplit.compile_core.runtime.link_program import link_program
from tests.lowering.band_programs import inputs_of, norm_backward
from tests.lowering.codegen_nests import (
    HAND_WRITTEN,
    Case,
    batch_norm_statistics,
    column_sums,
    inputs_for,
    layer_norm,
    residual_add,
    total,
)
from tests.lowering.codegen_operations import OPERATIONS, operands_for
from tests.lowering.compare_nests import compare_buffers
from tests.lowering.loop_evaluator import evaluate, evaluate_nest
from tests.lowering.product_programs import on as programs_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def on(device: torch.device, buffers: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: replace(spec, device=device) for name, spec in buffers.items()}


def run(
    nests: tuple[LoopNest, ...],
    buffers: Mapping[str, TensorSpec],
    storages: Mapping[str, torch.Tensor],
    folder: Path,
) -> None:
    sources = [generate(nest, buffers) for nest in nests]
    functions = build(sources, folder)
    for source in sources:
        # A base may lie before its buffer.
        functions[source.name](
            *(
                storages[name].data_ptr() + base * storages[name].element_size()
                for name, base in zip(source.buffers, source.bases or (0,) * len(source.buffers), strict=True)
            )
        )


def check(case: Case, storages: dict[str, torch.Tensor], folder: Path, tolerance: float = 1e-5) -> None:
    expected = evaluate_nest(case[0], storages)
    moved = {name: tensor.to(GPU) for name, tensor in storages.items()}
    run((case[0],), on(GPU, case[1]), moved, folder)
    compare_buffers(case, moved, expected, tolerance)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_nests(name: str, folder: Path) -> None:
    check(HAND_WRITTEN[name], inputs_for(HAND_WRITTEN[name]), folder, 1e-4 if "many_rows" in name else 1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_scalar_operations(name: str, folder: Path) -> None:
    operation, case = OPERATIONS[name]
    check(case, operands_for(operation, case), folder)


@pytest.mark.parametrize(
    "case",
    [column_sums(8192, 768), total((1000, 1031)), batch_norm_statistics(32, 64, 784), layer_norm(3, 400_001)],
    ids=["columns", "total", "channels", "rows"],
)
def test_split_reductions(case: Case, folder: Path) -> None:
    buffers = on(GPU, case[1])
    nests, partials = split_nest(case[0], buffers)
    assert len(nests) > 1
    storages = inputs_for(case)
    moved = {name: tensor.to(GPU) for name, tensor in storages.items()}
    moved |= {name: torch.empty(spec.shape, dtype=spec.dtype, device=GPU) for name, spec in partials.items()}
    run(nests, {**buffers, **partials}, moved, folder)
    compare_buffers(case, moved, evaluate_nest(case[0], storages), 1e-3)


def test_column_sums_of_bands_of_rows(folder: Path) -> None:
    program = norm_backward(2048, 768)
    result = split_reductions(join_column_sums(programs_on(GPU, program)))
    assert isinstance(result.steps[0], BandNest)
    sources = [generate(step, result.buffers) for step in result.steps if not isinstance(step, ExternCall)]
    run = link_program(result, sources, build(sources, folder))
    inputs = inputs_of(program)
    found = run([tensor.to(GPU) for tensor in inputs])
    for mine, expected in zip(found, evaluate(program, inputs), strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=2e-3, atol=2e-3)


def test_addresses_that_are_not_aligned(folder: Path) -> None:
    case = residual_add((64, 64))
    source = generate(case[0], on(GPU, case[1]))
    function = build([source], folder)[source.name]
    storages = {name: torch.randn(64 * 64 + 1, device=GPU)[1:] for name in source.buffers}
    function(*(storages[name] for name in source.buffers))
    torch.testing.assert_close(storages["z"], storages["x"] + storages["y"])


def test_launches_go_to_the_current_stream(folder: Path) -> None:
    case = residual_add((1024, 1024))
    source = generate(case[0], on(GPU, case[1]))
    function = build([source], folder)[source.name]
    x, y = (torch.randn(1024, 1024, device=GPU) for _ in range(2))
    z = torch.zeros(1024, 1024, device=GPU)
    stream = torch.cuda.Stream(GPU)
    arguments = [{"x": x, "y": y, "z": z}[name] for name in source.buffers]
    function(*arguments)  # the first launch from Python makes a launcher, which takes as long as what follows
    z.zero_()
    assert not z.any()  # loads the kernels of this very question, too
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        function(*arguments)
    assert not z.any()  # the default stream did not wait
    torch.cuda.synchronize()
    assert torch.equal(z, x + y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current(folder: Path) -> None:
    other = torch.device("cuda", 1)
    case = residual_add((32, 33))
    source = generate(case[0], on(other, case[1]))
    function = build([source], folder)[source.name]
    storages = {name: torch.randn(32 * 33, device=other) for name in source.buffers}
    function(*(storages[name] for name in source.buffers))
    torch.testing.assert_close(storages["z"], storages["x"] + storages["y"])
    assert torch.cuda.current_device() == 0
