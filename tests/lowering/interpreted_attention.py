"""Attention with changed scores in Triton's interpreter, on CPU tensors, against float64.

Run by ``test_products.py`` in a process of its own: the interpreter is chosen by an environment variable before Triton
is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import AttentionTile
from gradsplit.compile_core.lowering.attention import attention_tiles
from tests.lowering.attention_programs import CASES, AttentionKernels
from tests.lowering.interpreted_kernels import interpreted

# Large, for an interpreter, and smaller than the blocks of most masks.
TILE = AttentionTile(64, 64, 1, 4)


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {part: {256: (TILE, TILE)} for part in ("forward", "query_gradient", "key_gradients")}
    monkeypatch.setattr(attention_tiles, "_TILES", tiles)

    def run(source: KernelSource, tensors: Sequence[torch.Tensor]) -> None:
        interpreted(source, tmp_path)(*tensors)

    case = CASES[name]
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
