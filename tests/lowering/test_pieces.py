"""Long programs are fused piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsplit.compile_core.lowering.fusion import pieces
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.lowering_harness import check, compute_of, trace


def program(x: Tensor, weight: Tensor, scale: Tensor) -> list[Tensor]:
    """Values with readers in several pieces, a buffer that several nests fill, sums, products, lists."""
    kept = x.sin()
    parts = []
    for index in range(4):
        x = torch.softmax(x @ weight, -1) * scale + kept
        parts.append(x[:, index : index + 2].exp())
    joined = torch.cat([*parts, kept], -1)
    lists = torch._foreach_mul([*parts, joined], 0.5)
    return [x, joined.sum(0), joined.mean(-1), *lists]


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_pieces_compute_the_same(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(3, 8), torch.randn(8, 8), torch.randn(8)
    whole = check(program, *inputs)
    monkeypatch.setattr(pieces, "_MOST_STEPS", most)
    cut = check(program, *inputs)
    assert len(cut.steps) > len(whole.steps)
    assert len({step.name for step in cut.steps if hasattr(step, "name")}) == sum(
        hasattr(step, "name") for step in cut.steps
    )


def test_a_piece_that_is_all_is_fused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(compute_of(trace(program, torch.randn(3, 8), torch.randn(8, 8), torch.randn(8))))
    whole = fuse(lowered)
    monkeypatch.setattr(pieces, "_MOST_STEPS", len(lowered.steps))
    assert fuse(lowered) == whole
