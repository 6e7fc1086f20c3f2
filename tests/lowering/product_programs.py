"""Programs with matrix products, lowered as if for a GPU: what the tests of product kernels run and compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, ProductNest, ProductTile, Step
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.products.fuse_products import find_products, with_products
from tests.lowering.lowering_harness import compute_of, trace

TILE = ProductTile(32, 32, 16, 2, 4)


def _linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def _saved_too(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = functional.linear(x, weight, bias)
    return hidden, torch.tanh(hidden)


def _residual(x: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() + rest


def _batched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, y) * 0.5


def _masked(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, (x.t() @ weight), 0.0)


def _read_twice(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ weight
    return torch.relu(product), product.sum(0)


def _scaled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight, beta=0.5, alpha=2.0)


def _heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).view(4, 10, 2, 12).transpose(1, 2).contiguous()


def _added_at_indices(x: torch.Tensor, weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(9, len(weight)).index_add(0, places, torch.relu(x @ weight.t()))


def _inputs(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


_MASK = torch.arange(50 * 33).reshape(50, 33) % 3 == 0
# Name -> function, inputs, and how many steps one product stands for.
PROGRAMS: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int]] = {
    "linear_gelu": (_linear_gelu, _inputs((3, 14, 20), (40, 20), (40,)), 2),
    "linear_gelu_bfloat16": (_linear_gelu, _inputs((3, 14, 20), (40, 20), (40,), dtype=torch.bfloat16), 2),
    "linear_gelu_float16": (_linear_gelu, _inputs((64, 32), (64, 32), (64,), dtype=torch.float16), 2),
    "saved_too": (_saved_too, _inputs((37, 16), (33, 16), (33,)), 2),
    "residual": (_residual, _inputs((70, 48), (31, 48), (70, 31)), 2),
    "residual_of_a_row": (_residual, _inputs((70, 48), (31, 48), (31,)), 2),
    "batched": (_batched, _inputs((5, 17, 8), (5, 8, 19)), 2),
    "masked": (_masked, [*_inputs((20, 50), (20, 33)), _MASK], 2),
    "read_twice": (_read_twice, _inputs((40, 16), (16, 36)), 1),
    "heads": (_heads, _inputs((40, 16), (16, 24)), 2),
    "added_at_indices": (
        _added_at_indices,
        [*_inputs((70, 48), (33, 48)), torch.arange(70) * 5 % 9],
        2,
    ),
    "scaled": (_scaled, _inputs((33, 24), (24, 35), (35,)), 1),
}


def product_program(name: str, with_epilogues: bool = True) -> tuple[LoopProgram, list[int]]:
    """The program with its products as kernels for a GPU, and how many steps each of them stands for."""
    function, inputs, _ = PROGRAMS[name]
    program = on(torch.device("cuda", 0), fuse(lower(compute_of(trace(function, *inputs)))))
    candidates = find_products(program, "ieee", with_epilogues)
    candidates = [replace(c, product=replace(c.product, tile=TILE)) for c in candidates]
    program = with_products(program, candidates)
    verify_program(program)
    return program, [len(candidate.positions) for candidate in candidates]


def on(device: torch.device, program: LoopProgram) -> LoopProgram:
    """A program of buffers on one device as one of another."""

    def moved(step: Step) -> Step:
        if isinstance(step, ExternCall) and "device" in step.keywords:
            return replace(step, keywords={**step.keywords, "device": device})
        return step

    buffers = {name: replace(spec, device=device) for name, spec in program.buffers.items()}
    return replace(program, buffers=buffers, steps=tuple(map(moved, program.steps)))


def products(program: LoopProgram) -> list[ProductNest]:
    return [step for step in program.steps if isinstance(step, ProductNest)]
