"""A layer norm's backward as nests: rows, the column sums of its weights, and those of the bias before it."""

from __future__ import annotations

import torch

from gradsplit.compile_core.ir.loops import LoopNest, LoopProgram, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from tests.lowering.codegen_nests import NestBuilder

INPUTS = ("upstream", "residual", "x", "weight", "mean", "rstd")
OUTPUTS = ("dx", "dx_narrow", "dweight", "dbias", "dbias_twice", "dbias_before")


def norm_backward(rows: int = 1024, columns: int = 40) -> LoopProgram:
    """Nothing but the sums reads ``gradient``, which the rows' nest stores. One of them goes to two places."""
    b = NestBuilder((rows, columns), 1)
    b.buffer("upstream", (rows, columns), torch.bfloat16)
    for name in ("residual", "x", "gradient", "dx"):
        b.buffer(name, (rows, columns))
    b.buffer("dx_narrow", (rows, columns), torch.float16)
    b.buffer("weight", (columns,))
    for name in ("mean", "rstd"):
        b.buffer(name, (rows,))
    for name in ("dweight", "dbias", "dbias_twice", "dbias_before"):
        b.buffer(name, (columns,))
    gradient = b.apply("add", b.load("upstream", (0, 1)), b.load("residual", (0, 1)))
    b.store("gradient", (0, 1), gradient)
    xhat = normalised(b, (0, 1), (0,))
    scaled = b.apply("mul", gradient, b.load("weight", (1,)))
    total, product = b.reduce("sum", scaled), b.reduce("sum", b.apply("mul", scaled, xhat))
    moved = b.apply("add", total, b.apply("mul", xhat, product))
    rstd = b.load("rstd", (0,))
    dx = b.apply("mul", rstd, b.apply("sub", scaled, b.apply("mul", moved, b.constant(1 / columns))))
    b.store("dx", (0, 1), dx)
    b.store("dx_narrow", (0, 1), dx)

    sums = NestBuilder((columns, rows), 1)
    sums.buffers = b.buffers
    xhat = normalised(sums, (1, 0), (1,))
    gradient = sums.load("gradient", (1, 0))
    sums.store("dweight", (0,), sums.reduce("sum", sums.apply("mul", gradient, xhat)))
    for name in ("dbias", "dbias_twice"):
        sums.store(name, (0,), sums.reduce("sum", gradient))

    before = NestBuilder((columns, rows), 1)
    before.buffers = b.buffers
    before.store("dbias_before", (0,), before.reduce("sum", before.load("dx_narrow", (1, 0))))
    return program_of(b.buffers, b.nest("rows"), sums.nest("sums"), before.nest("before"))


def normalised(b: NestBuilder, matrix: tuple[int, int], row: tuple[int]) -> int:
    return b.apply("mul", b.apply("sub", b.load("x", matrix), b.load("mean", row)), b.load("rstd", row))


def program_of(buffers: dict[str, TensorSpec], *nests: LoopNest) -> LoopProgram:
    outputs = tuple(View(name, buffers[name].shape, buffers[name].stride) for name in OUTPUTS)
    return LoopProgram("norm_backward", INPUTS, (), buffers, {}, nests, outputs)


def inputs_of(program: LoopProgram) -> list[torch.Tensor]:
    torch.manual_seed(0)
    specs = [program.buffers[name] for name in program.inputs]
    return [torch.randn(spec.shape).to(spec.dtype) for spec in specs]
