"""Attention with changed scores as generated kernels: which calls become some, that they compile and compute.

In the interpreter they compute in a process of ``test_products.py``.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import gradsplit
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.loops import AttentionNest, AttentionTile, LoopProgram
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.attention.attention_tiles import AttentionSizes, attention_tile
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from tests.lowering import attention_programs
from tests.lowering.attention_programs import (
    CASES,
    AttentionKernels,
    Case,
    alibi,
    causal,
    identity,
    no_kernel,
)


def kernels_of(case: Case, folder: Path) -> AttentionKernels:
    """What is generated for a step."""
    kernels = AttentionKernels(no_kernel, folder)
    results = kernels.compiled(case.program())(*(tensor.requires_grad_() for tensor in case.operands()))
    torch.autograd.backward(results[:2], [torch.zeros_like(result) for result in results[:2]])
    return kernels


def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    case = Case(alibi, causal, heads=(4, 2), elements=(80, 64), dtype=torch.bfloat16, block=64)
    kernels = kernels_of(case, tmp_path)
    assert len(kernels.sources) == 3
    for source in kernels.sources:
        assert "wgmma" in compile_triton_for(source, ("cuda", 90, 32), tmp_path).asm["ptx"]


@pytest.mark.parametrize(
    "case",
    [
        Case(alibi, causal, dtype=torch.float64),
        Case(alibi, causal, elements=(264, 16)),
        Case(alibi, causal, lengths=(60, 60), block=12),
        Case(lambda s, b, h, i, j: torch.stack([s, s * 0.5]).sum(0), causal),
    ],
    ids=["float64", "long rows", "odd blocks", "sums"],
)
def test_what_kernels_cannot_do_is_right_without(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = AttentionKernels(no_kernel, tmp_path)
    operands = case.operands()
    with caplog.at_level(logging.INFO):
        found = kernels.compiled(case.program())(*operands)
    assert not kernels.sources and "all scores of" in caplog.text
    torch.testing.assert_close(list(found), list(case.program()(*operands)), rtol=1e-5, atol=1e-5)


def program_of(case: Case, folder: Path) -> LoopProgram:
    """The region of its forward."""
    kernels = AttentionKernels(no_kernel, folder)
    kernels.compiled(case.program())(*case.operands())
    return kernels.programs[0]


def test_the_program_is_printed_and_verified(tmp_path: Path) -> None:
    program = program_of(Case(alibi, causal, heads=(4, 2)), tmp_path)
    verify_program(program)
    printed = print_program(program)
    assert "attention forward" in printed and "tiles of 128x32" in printed
    (nest,) = (step for step in program.steps if isinstance(step, AttentionNest))
    shorter = replace(nest.operands[1], shape=(1, 2, 99, 16))
    broken: list[tuple[AttentionNest, str]] = [
        (
            replace(nest, operands=(nest.operands[0], shorter, nest.operands[2])),
            "keys that do not fit|a body over",
        ),
        (replace(nest, lists=nest.lists[:1]), "lists of neither"),
        (replace(nest, part="query_gradient"), "other operands"),
        (replace(nest, results=(nest.operands[0], None, None)), "overwrites its operand"),
    ]
    for other, rule in broken:
        steps = tuple(other if step is nest else step for step in program.steps)
        with pytest.raises(InternalError, match=rule):
            verify_program(replace(program, steps=steps))


def test_results_and_gradients_are_stored_where_they_are_wanted(tmp_path: Path) -> None:
    case = Case(alibi, causal, batch=2, heads=(4, 2))
    attend = case.program()
    kernels = AttentionKernels(no_kernel, tmp_path)
    operands = [tensor.requires_grad_() for tensor in case.operands()]
    result = kernels.compiled(lambda *given: attend(*given)[0])(*operands)
    assert result.stride() == operands[0].stride()
    result.sum().backward()
    forward, backward = ([type(step) for step in program.steps] for program in kernels.programs)
    assert forward == [AttentionNest]
    assert backward.count(AttentionNest) == 2 and len(backward) == 3, "delta and the kernels, no copies"


def test_tiles_divide_the_blocks_of_the_mask() -> None:
    def tile(block: int, lengths: tuple[int, int] = (4096, 4096), elements: int = 64) -> Any:
        sizes = (elements, elements), lengths, (block, block), 227 << 10
        return attention_tile("forward", AttentionSizes(torch.bfloat16, *sizes))

    assert tile(128) == tile(1 << 30) == tile(64) == AttentionTile(64, 64, 3, 4)
    assert tile(96) == AttentionTile(32, 32, 3, 4)
    assert tile(100) is None and tile(128, elements=300) is None
    assert tile(128, (1, 60)) == AttentionTile(16, 64, 3, 4)
    assert tile(64, (70, 200), 100) == AttentionTile(64, 64, 2, 8)
    assert tile(128, (70, 200), 100) == AttentionTile(128, 128, 2, 8)


def test_tiles_find_room() -> None:
    sizes = AttentionSizes(torch.bfloat16, (128, 128), (4096, 4096), (128, 128), 163 << 10)
    assert attention_tile("query_gradient", sizes) == AttentionTile(128, 128, 1, 8)
    smaller = attention_tile("query_gradient", replace(sizes, shared_bytes=64 << 10))
    assert smaller == AttentionTile(64, 32, 1, 8)
    assert attention_tile("query_gradient", replace(sizes, shared_bytes=16 << 10)) is None


# A product in a thread of autograd's engine that has run nothing on the GPU before, in the dense program.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_they_compute_on_a_gpu(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for tensor in ("SLOPES", "BIAS", "DOCUMENTS"):
        monkeypatch.setattr(attention_programs, tensor, getattr(attention_programs, tensor).cuda())
    case = replace(CASES[name], device="cuda", dtype=dtype)
    with caplog.at_level(logging.INFO):
        found = []
        for function, wanted in (
            (case.exact, torch.float64),
            (gradsplit.compile(case.program(), fullgraph=True), dtype),
        ):
            operands = [tensor.to(wanted).requires_grad_() for tensor in case.operands()]
            results = function(*operands)
            arriving = [
                torch.linspace(-1, 2, r.numel(), device="cuda").view(r.shape).to(r.dtype) for r in results[:2]
            ]
            torch.autograd.backward(results[:2], arriving)
            found.append([*(result.detach() for result in results), *(tensor.grad for tensor in operands)])
    assert "all scores of" not in caplog.text
    for mine, expected in zip(found[1], found[0], strict=True):
        bound = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
        bound *= 1 + float(expected.nan_to_num(neginf=0).abs().max())
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=bound)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.gpu
def test_the_function_of_torch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_programs, "SLOPES", attention_programs.SLOPES.cuda())
    case = Case(alibi, causal, batch=2, heads=(4, 2), lengths=(300, 300), elements=(64, 64), device="cuda")
    mask = create_block_mask(causal, None, None, *case.lengths, device="cuda")

    def attend(query: Any, key: Any, value: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            result, aux = flex_attention(
                query, key, value, alibi, mask, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            return result, aux.lse / math.log(2)  # type: ignore[operator]

    found = []
    for function, dtype in (
        (case.exact, torch.float64),
        (gradsplit.compile(attend, fullgraph=True), torch.float32),
    ):
        operands = [tensor.to(dtype).requires_grad_() for tensor in case.operands()]
        result, sums = function(*operands)[:2]
        (result.square().sum() + sums.sum()).backward()
        found.append([result.detach(), sums.detach(), *(tensor.grad for tensor in operands)])
    for mine, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(
            mine.double(), expected, rtol=0, atol=2e-2 * (1 + float(expected.abs().max()))
        )


@pytest.mark.gpu
def test_no_scores_are_in_memory_on_a_gpu() -> None:
    case = Case(identity, causal, heads=(8, 8), lengths=(8192, 8192), elements=(64, 64), dtype=torch.bfloat16)
    case = replace(case, device="cuda")
    compiled = gradsplit.compile(case.program(), fullgraph=True)
    operands = [tensor.requires_grad_() for tensor in case.operands()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compiled(*operands)[0].sum().backward()
    scores = 8 * 8192 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 4
