from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import gradsplit
from gradsplit.compile_core.export.exported import Exported
from gradsplit.distributed import export_pipeline
from gradsplit.distributed.pipeline import piece_costs
from gradsplit.distributed.pipeline.example_inputs import example_call
from gradsplit.distributed.pipeline.graph_facts import examine


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_pieces_that_are_alike_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node costs its share of the piece that it is in, by what it costs alone."""
    timed = []

    def measure(piece: Exported, call: Sequence[Tensor]) -> float:
        assert [tuple(tensor.shape) for tensor in call] == [argument.example for argument in piece.arguments]
        timed.append(piece)
        return 1.0

    monkeypatch.setattr(piece_costs, "_measure", measure)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    exported = gradsplit.export(model, (torch.randn(4, 8),))
    facts, call = examine(exported), example_call(exported, (), {})
    found = piece_costs.seconds_as_compiled(exported, facts, call, [0.1] * len(facts.nodes), 1)
    layer = len(facts.nodes) // 6
    # The first is cut where only its input crosses, which each stage could read; the others end with their sum.
    assert len(timed) == 3
    assert found[-layer:] == pytest.approx([1.0 / layer] * layer)


def test_what_cannot_be_timed_costs_what_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        piece_costs, "_measure", lambda piece, call: 2.0 if len(piece.graph.nodes) == 13 else None
    )
    exported = gradsplit.export(nn.Sequential(*(Layer() for _ in range(6))), (torch.randn(4, 8),))
    facts, call = examine(exported), example_call(exported, (), {})
    found = piece_costs.seconds_as_compiled(exported, facts, call, [0.1] * len(facts.nodes), 1)
    assert found == pytest.approx([0.4] * len(facts.nodes))


@pytest.mark.parametrize("dims", [None, {"x": {0: Dim.DYNAMIC}}])
def test_pieces_run_as_programs(dims: Any) -> None:
    exported = gradsplit.export(Layer(), (torch.randn(4, 8),), dynamic_shapes=dims)
    facts, call = examine(exported), example_call(exported, (), {})
    found = piece_costs.seconds_as_compiled(exported, facts, call, [0.1] * len(facts.nodes), 1)
    assert sum(found) < 0.1


def test_a_costly_loss_moves_the_cut(tmp_path: Path) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        for _ in range(20):
            target = target @ target.softmax(0)
        return (output - target[:4, :8]).square().sum()

    held = []
    for number, loss in enumerate((None, (loss_fn, torch.randn(256, 256)))):
        model = nn.Sequential(*(Layer() for _ in range(6)))
        layout = export_pipeline(model, (torch.randn(4, 8),), 2, folder=tmp_path / str(number), loss=loss)
        held.append(layout.stages[0].state_bytes)
    assert held[1] > held[0]
