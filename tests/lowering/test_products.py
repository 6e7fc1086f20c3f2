"""Matrix products as generated kernels: what joins them, that they compile and compute, and how one is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, LoopProgram, ProductTile
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.products import choose_products as choosing
from gradsplit.compile_core.lowering.products.choose_products import choose_products, tiles_for
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from gradsplit.compile_core.lowering.triton_kernels.codegen_product import generate_product
from tests.lowering.lowering_harness import compute_of, trace
from tests.lowering.product_programs import PROGRAMS, on, product_program, products
from tests.lowering.run_interpreted import check_interpreted


@pytest.mark.parametrize("name", PROGRAMS)
def test_nests_join_the_product_that_they_read(name: str) -> None:
    program, joined = product_program(name)
    assert joined == [PROGRAMS[name][2]]
    assert len(products(program)) == 1 and not any(isinstance(step, ExternCall) for step in program.steps)
    assert all(len(product.epilogue.body) for product in products(product_program(name, False)[0]))


def test_a_result_that_nobody_else_reads_is_not_written() -> None:
    (fused,) = products(product_program("linear_gelu")[0])
    assert fused.product not in writes(fused) | reads(fused)
    (kept,) = products(product_program("saved_too")[0])
    assert kept.product in writes(kept)


def test_without_epilogues_a_product_stands_alone() -> None:
    program, joined = product_program("linear_gelu", with_epilogues=False)
    assert joined == [1] and sum(isinstance(step, LoopNest) for step in program.steps) == 1
    assert "= arg0_1" in print_program(program) and "blocks of 32x32x16" in print_program(program)


@pytest.mark.parametrize("name", ["linear_gelu_bfloat16", "batched", "heads"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_they_compile_for_a_gpu(name: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program, _ = product_program(name)
    (product,) = products(program)
    source = generate_product(replace(product, precision=precision), program.buffers)
    assert compile_triton_for(source, ("cuda", 90, 32), tmp_path).asm["ptx"]


def test_they_compute_in_the_interpreter() -> None:
    """Attention too, since a process of its own takes longer to start than to compute."""
    check_interpreted("interpreted_products", "interpreted_attention")


def test_tiles_fit_the_matrices() -> None:
    (product,) = products(product_program("linear_gelu")[0])
    assert {tile.inner for tile in tiles_for(product, torch.float32)} == {32}
    assert all(tile.rows <= 64 and tile.columns <= 64 for tile in tiles_for(product, torch.float32))


def test_the_fastest_is_taken_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs, _ = PROGRAMS["linear_gelu"]
    program = on(torch.device("cuda", 0), fuse(lower(compute_of(trace(function, *inputs)))))
    timed: list[int] = []
    seconds = {1: 3.0, 2: 5.0}  # by number of steps: one product against a call and a nest

    def time_steps(steps: Any, _program: LoopProgram, _run: Any) -> float:
        timed.append(len(steps))
        return seconds[len(steps)]

    monkeypatch.setattr(choosing, "_seconds", time_steps)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(choosing, "start_build", lambda sources, folder: None)
    chosen = choose_products(program, tmp_path / "one", True, lambda part: lambda tensors: None)
    assert len(chosen.steps) == 1 and 2 in timed and 1 in timed
    count = len(timed)
    monkeypatch.setattr(choosing, "_known", {})
    assert choose_products(program, tmp_path / "one", True, lambda part: lambda tensors: None) == chosen
    assert len(timed) == count, "times are on disk"
    monkeypatch.setattr(choosing, "_known", {})
    seconds[2] = 1.0
    assert choose_products(program, tmp_path / "two", True, lambda part: lambda tensors: None) == program


def test_no_memory_to_time_in_means_torchs_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function, inputs, _ = PROGRAMS["residual"]
    program = on(torch.device("cuda", 0), fuse(lower(compute_of(trace(function, *inputs)))))

    def fail(steps: Any, _program: LoopProgram, _run: Any) -> float:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(choosing, "_seconds", fail)
    monkeypatch.setattr(choosing, "start_build", lambda sources, folder: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert choose_products(program, tmp_path, True, lambda part: lambda tensors: None) == program
    assert "was not timed: no memory" in caplog.text


# All tiles are compiled for each of nine choices: minutes where other tests have the processors, too.
@pytest.mark.timeout(400)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_tile_computes_on_a_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Makes each tile the fastest in turn, and compares a step of training with eager in float64."""
    model = torch.nn.Sequential(torch.nn.Linear(192, 320), torch.nn.GELU(), torch.nn.Linear(320, 200))
    model = model.cuda().to(dtype)
    x = torch.randn(300, 192, device="cuda", dtype=dtype)
    exact = [p.detach().double().requires_grad_() for p in model.parameters()]
    functional = torch.nn.functional
    hidden = functional.gelu(functional.linear(x.double(), *exact[:2]))
    functional.linear(hidden, *exact[2:]).square().mean().backward()
    for number in range(9):
        monkeypatch.setattr(choosing, "_known", {})
        monkeypatch.setattr(choosing, "_seconds", _favour(number))
        options = {"max_autotune": True, "cache_folder": tmp_path / str(number)}
        compiled = gradsplit.compile(model, options=options)
        model.zero_grad()
        compiled(x).float().square().mean().backward()
        bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
        for parameter, expected in zip(model.parameters(), exact, strict=True):
            assert parameter.grad is not None and expected.grad is not None
            error = (parameter.grad.double() - expected.grad).norm() / expected.grad.norm()
            assert error < bound, f"tile {number}: {error:.1e}"


def _favour(number: int) -> Any:
    """Times by which the tile of this number is the fastest; the number wraps round."""
    seen: dict[ProductTile, int] = {}

    def seconds(steps: Any, _program: LoopProgram, _run: Any) -> float:
        tile = getattr(steps[0], "tile", None)
        if tile is None:
            seen.clear()
            return 1.0
        seen[tile] = len(seen)
        return 0.1 if seen[tile] == number else 0.5

    return seconds


@pytest.mark.gpu
def test_times_are_taken_on_a_gpu(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    model = model.cuda().bfloat16()
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    compiled = gradsplit.compile(model, options={"max_autotune": True, "cache_folder": tmp_path})
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    compiled(x).sum().backward()
    assert list((tmp_path / "entries").glob("*/seconds.json"))
