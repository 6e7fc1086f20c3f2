"""Tensors of more than 2^31 elements: which integers address them, and on a GPU that they are addressed right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradsplit
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import generate_cpp
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from tests.lowering.codegen_nests import Case, NestBuilder, softmax, transpose

ROWS, COLUMNS = 2**16 + 3, 2**15 + 5
I64 = torch.int64


def copied(rows: int, columns: int) -> Case:
    b = NestBuilder((rows, columns))
    for name in ("x", "y"):
        b.buffer(name, (rows, columns), torch.uint8)
    b.store("y", (0, 1), b.load("x", (0, 1)))
    return b.nest("copied"), b.buffers


def summed(rows: int, columns: int, axes: tuple[int, int] = (0, 1)) -> Case:
    """Sums of rows, or of columns."""
    b = NestBuilder((rows, columns), 1)
    shape = (rows, columns) if axes == (0, 1) else (columns, rows)
    b.buffer("x", shape, torch.uint8)
    b.buffer("y", (rows,), I64)
    b.store("y", (0,), b.reduce("sum", b.apply("cast", b.load("x", axes), dtype=I64)))
    return b.nest("summed"), b.buffers


LARGE = {
    "pointwise": copied(ROWS, COLUMNS),
    "row sums": summed(ROWS, COLUMNS),
    "column sums": summed(COLUMNS, ROWS, (1, 0)),
    "transposed": transpose(ROWS, COLUMNS),
    "few long rows": summed(3, 2**30),
    "a row of a table": softmax(ROWS, COLUMNS),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_are_addressed_by_64_bits(name: str, tmp_path: Path) -> None:
    source = generate_triton(*LARGE[name])
    assert "program_id(0).to(tl.int64)" in source.text
    assert compile_triton_for(source, ("cuda", 90, 32), tmp_path).asm["ptx"]


def test_small_tensors_by_32_bits_on_a_gpu_and_all_by_64_on_a_cpu() -> None:
    assert "int64" not in generate_triton(*copied(2**15, 2**15)).text
    assert "int64" not in generate_triton(*softmax(2**10, 2**15)).text
    text = generate_cpp(*copied(ROWS, COLUMNS)).text
    assert "for (int64_t " in text and "for (int " not in text


PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "pointwise": lambda x: x * 3 + 1,
    "rows": lambda x: x.sum(1),
    "columns": lambda x: x.sum(0),
    "all": lambda x: x.sum(),
    "transposed": lambda x: x.t().contiguous() + 1,
    "the end": lambda x: x[-5:, -7:] * 2,
    "flipped": lambda x: x.flip(0) ^ 1,
}


@pytest.mark.gpu
@pytest.mark.xdist_group("large_tensors")  # one after another: each takes half of a small GPU's memory
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_on_a_gpu(name: str) -> None:
    x = torch.arange(ROWS * COLUMNS, device="cuda").remainder_(251).to(torch.uint8).view(ROWS, COLUMNS)
    torch.testing.assert_close(gradsplit.compile(PROGRAMS[name])(x), PROGRAMS[name](x), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.xdist_group("large_tensors")  # one after another: each takes half of a small GPU's memory
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_softmax_of_bfloat16_on_a_gpu() -> None:
    x = torch.randn(COLUMNS, ROWS, device="cuda", dtype=torch.bfloat16)
    found = gradsplit.compile(lambda x: torch.softmax(x, 1))(x)
    for start in range(0, COLUMNS, 4096):
        exact = torch.softmax(x[start : start + 4096].double(), 1)
        assert ((found[start : start + 4096].double() - exact).abs() <= exact * 2.0**-8 + 1e-30).all()
