"""Programs with nests that are alike, lowered as if for a GPU: what the tests of batches run and compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir.loops import LoopProgram, NestBatch
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.overwrite_inputs import overwrite_inputs
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.lowering_harness import compute_of, trace
from tests.lowering.product_programs import on

aten = torch.ops.aten


def casts(xs: list[Tensor]) -> list[Tensor]:
    return [x.to(torch.bfloat16) for x in xs]


def _momentum(xs: list[Tensor], ys: list[Tensor], rate: Tensor) -> list[Tensor]:
    buffers = aten._foreach_add(aten._foreach_mul(xs, 0.9), ys)
    return [*buffers, *(x - rate * buffer for x, buffer in zip(xs, buffers, strict=True))]


def _sums(xs: list[Tensor]) -> list[Tensor]:
    return [x.sum(0) for x in xs]


def _transposed(xs: list[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous().to(torch.bfloat16) for x in xs]


def _softmax(xs: list[Tensor]) -> list[Tensor]:
    return [torch.softmax(x, -1) for x in xs]


def _rows(table: Tensor, *indices: Tensor) -> list[Tensor]:
    return [table[index] * 2 for index in indices]


def _counts(xs: list[Tensor]) -> list[Tensor]:
    return aten._foreach_add(xs, 1)


def _parts(x: Tensor) -> list[Tensor]:
    """Parts of one tensor, at offsets of their own."""
    return [part.exp() for part in x.split(64)]


def _scaled(xs: list[Tensor], numbers: Tensor) -> list[Tensor]:
    """Each by a number of its own and by one for all, which lie in one tensor."""
    return [x * numbers.select(0, k) + numbers.select(0, 3) for k, x in enumerate(xs)]


def _list(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


_SIZES = [(3, 5), (7,), (), (0, 4), (1,), (2, 3, 4), (300, 7), (16, 8), (1024,), (64,)]
_INDICES = [torch.tensor([0, k, 8]) for k in (1, 5, 7)]

# name -> function, its inputs, the numbers of members of the batches of its program
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[int]]] = {
    "casts": (casts, (_list(*_SIZES),), [2, 3, 4]),
    "casts_of_whole_blocks": (casts, (_list((256,), (128, 4), (128,)),), [3]),
    "momentum": (_momentum, (_list(*_SIZES), _list(*_SIZES), torch.tensor(0.1)), [2, 2, 3, 3, 4, 4]),
    "column_sums": (_sums, (_list(*[(16, 40)] * 3),), [3]),
    "transposes": (_transposed, (_list(*[(2, 40, 32)] * 3),), [3]),
    "softmax": (_softmax, (_list(*[(6, 50)] * 4),), [4, 4, 4, 4]),
    "rows": (_rows, (*_list((9, 8)), *_INDICES), [3]),
    "counts": (_counts, ([torch.tensor(k) for k in range(5)],), [5]),
    "scaled": (_scaled, (_list((9,), (5, 4), (21,)), *_list((4,))), [3]),
    "parts": (_parts, (*_list((192,)),), [3]),
}


def batch_program(name: str) -> LoopProgram:
    """Not fused: nests that are alike and near each other would be one already."""
    function, inputs, _ = PROGRAMS[name]
    lowered = lower(compute_of(trace(function, *inputs)))
    program = batch_nests(on(torch.device("cuda", 0), lowered))
    verify_program(program)
    return program


def batches(program: LoopProgram) -> list[NestBatch]:
    return [step for step in program.steps if isinstance(step, NestBatch)]


def momentum_in_place(*sizes: tuple[int, ...]) -> LoopProgram:
    """A step with momentum over parameters of these sizes, as if for a GPU. Inputs: parameters, gradients, momenta; the
    first and the last are stored where they are."""

    def step(parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        new = [m * 0.9 + g for m, g in zip(momenta, gradients, strict=True)]
        return [*(p - 0.1 * m for p, m in zip(parameters, new, strict=True)), *new]

    lists = [_list(*sizes) for _ in range(3)]
    compute = compute_of(trace(step, *lists))
    count = len(sizes)
    inputs = [*compute.inputs[:count], *compute.inputs[2 * count :]]
    compute = replace(compute, replaced=dict(zip(compute.outputs, inputs, strict=True)))
    program = fuse(on(torch.device("cuda", 0), lower(compute)))
    program = batch_nests(overwrite_inputs(program, compute))
    verify_program(program)
    return program


def averages_in_place(*lengths: int) -> LoopProgram:
    """Averages of columns go into running ones, as if on a GPU. Inputs: matrices of four rows, running averages; the
    latter are given their new values, which are sums, by copies."""

    def step(matrices: list[Tensor], averages: list[Tensor]) -> list[Tensor]:
        return [0.9 * a + 0.1 * m.mean(0) for a, m in zip(averages, matrices, strict=True)]

    matrices, averages = _list(*((4, n) for n in lengths)), _list(*((n,) for n in lengths))
    compute = compute_of(trace(step, matrices, averages))
    count = len(lengths)
    compute = replace(compute, replaced=dict(zip(compute.outputs, compute.inputs[count:], strict=True)))
    program = fuse(on(torch.device("cuda", 0), lower(compute)))
    program = batch_nests(overwrite_inputs(program, compute))
    verify_program(program)
    return program
