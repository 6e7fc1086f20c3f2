"""Attention with changed scores in Triton's interpreter, on CPU tensors, against float64.

Run by ``test_products.py`` in a process of its own: the interpreter is chosen by an environment variable before Triton
is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import AttentionTile
from gradsplit.compile_core.lowering.attention import attention_tiles
from tests.lowering.attention_programs import (
    CASES,
    AttentionKernels,
    Case,
    alibi,
    everything,
    identity,
    relative,
)
from tests.lowering.interpreted_kernels import interpreted

# Large, for an interpreter, and smaller than the blocks of most masks.
TILE = AttentionTile(64, 64, 1, 4)
EXAMPLES = 3


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES[name], TILE, tmp_path, monkeypatch)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Sides that are no multiple of tiles or blocks, and masks with empty, partial and whole blocks."""
    group, count = draw(st.sampled_from([1, 2])), draw(st.integers(2, 7))
    step, kept = draw(st.integers(0, 3)), draw(st.integers(1, count))
    wide = draw(st.sampled_from([1, 16, 40]))

    def scattered(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i // wide * step + j // wide + h + b) % count < kept

    return Case(
        draw(st.sampled_from([identity, alibi, relative])),
        draw(st.sampled_from([scattered, everything])),
        batch=draw(st.integers(1, 2)),
        heads=(2, 2 // group),
        lengths=(draw(st.integers(1, 80)), draw(st.integers(1, 80))),
        elements=(draw(st.sampled_from([3, 16])), draw(st.sampled_from([16, 20]))),
        block=draw(st.sampled_from([16, 48, 128])),
        masks_heads=True,
    )


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(case=random_cases(), side=st.sampled_from([16, 32]))
def test_random_masks_and_sizes(
    case: Case, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, AttentionTile(side, 16, 1, 4), tmp_path, monkeypatch)


def check(case: Case, tile: AttentionTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {part: {256: (tile, tile)} for part in ("forward", "query_gradient", "key_gradients")}
    monkeypatch.setattr(attention_tiles, "_TILES", tiles)

    def run(source: KernelSource, tensors: Sequence[torch.Tensor]) -> None:
        interpreted(source, tmp_path)(*tensors)

    kernels = AttentionKernels(run, tmp_path)
    compiled = kernels.compiled(case.program())
    found = []
    for function, dtype in ((case.exact, torch.float64), (compiled, case.dtype)):
        operands = [tensor.to(dtype).requires_grad_() for tensor in case.operands()]
        results = function(*operands)
        arriving = [torch.linspace(-1, 2, r.numel(), dtype=dtype).view(r.shape) for r in results[:2]]
        torch.autograd.backward(results[:2], [a.to(r.dtype) for a, r in zip(arriving, results, strict=False)])
        found.append([*(result.detach() for result in results), *(tensor.grad for tensor in operands)])
    assert len(kernels.sources) == 3
    for mine, expected in zip(found[1], found[0], strict=True):
        bound = 2e-3 if case.dtype == torch.float16 else 2e-6
        bound *= 1 + float(expected.nan_to_num(neginf=0).abs().max())
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=bound)
