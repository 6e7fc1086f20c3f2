"""Fingerprints of captured graphs: equal for other sizes and in other processes, different for any other program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_core.compiled_function import CompiledFunction
from compile_core.ir.captured import CapturedGraph
from distributed.agreement.graph_fingerprint import GraphFingerprint, first_difference, graph_fingerprint


class Net(nn.Module):
    """Operators that take sizes in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, way: str = "relu") -> torch.Tensor:
        rows = x.size(0)
        x = self.norm(self.first(x)).view(rows, 2, 4).transpose(1, 2).sum(1) / rows
        x = checkpoint(lambda t: t.sin() * (t.size(0) + 1), x, use_reentrant=False)
        if way == "dims":
            x = x.sum(0, keepdim=True).expand(rows, -1)
        else:
            x = x.sum(1, keepdim=True).expand(rows, 2)
        if way in ("tanh", "relu"):
            x = getattr(x, way)()
        if way == "second":
            x = self.second(F.pad(x, (0, 6)))[:, :2]
        if way == "part":
            return x.chunk(2, dim=1)[1]
        return x.chunk(2, dim=1)[0] + torch.arange(rows)[:, None] + F.dropout(x, 0.1)


def fingerprints(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any
) -> list[GraphFingerprint]:
    found: list[GraphFingerprint] = []

    def compile_graph(captured: CapturedGraph, inputs: Sequence[Any]) -> Any:
        found.append(graph_fingerprint(captured))
        return captured.module

    compiled = CompiledFunction(function, compile_graph, **options)
    for call in calls:
        compiled(*call)
    return found


def test_sizes_are_left_out() -> None:
    net = Net()
    sizes = [(torch.ones(rows, 8),) for rows in (4, 1, 6, 7)]
    static = fingerprints(net, sizes, dynamic=False)
    opened = fingerprints(net, sizes)
    dynamic = fingerprints(net, sizes[:1], dynamic=True)
    assert len(static) == 4
    assert len(opened) > 1
    assert len({found.digest for found in (*static, *opened, *dynamic)}) == 1
    assert not static[0].open_sizes
    assert opened[-1].open_sizes == ("x has open dims 0",)
    assert "x has open dims 0, 1" in dynamic[0].open_sizes


@pytest.mark.parametrize("way", ["tanh", "dims", "second", "part"])
def test_another_program_is_told_by_its_first_line(way: str) -> None:
    net = Net()
    one, other = (fingerprints(net, [(torch.ones(4, 8), name)])[0] for name in ("relu", way))
    assert one.digest != other.digest
    position = first_difference(one.lines, other.lines)
    assert position is not None
    assert one.lines[position] != other.lines[position]
    assert any("test_graph_fingerprint.py" in found.places[position] for found in (one, other))


def test_dtypes_and_frozen_parameters_are_told() -> None:
    given = torch.ones(4, 8)
    one = fingerprints(Net(), [(given,)])[0]
    double = fingerprints(Net().double(), [(given.double(),)])[0]
    frozen = Net()
    frozen.first.weight.requires_grad_(False)
    assert len({one.digest, double.digest, fingerprints(frozen, [(given,)])[0].digest}) == 3
    assert any("first.weight" in line for line in one.lines)


def test_nothing_of_the_process_is_in_it(tmp_path: Path) -> None:
    """Device indices, addresses and folders; the lines are equal in a process with another hash seed and folder."""

    def program(x: torch.Tensor, folder: str, device: str) -> torch.Tensor:
        return x.to(torch.device("meta", int(device[-1]))).to(device).sin()

    found = [
        fingerprints(program, [(torch.ones(3, device="meta"), f"/tmp/{index}", f"meta:{index}")])[0]
        for index in (0, 1)
    ]
    assert found[0].lines == found[1].lines

    script = (
        "import torch\n"
        "from tests.distributed.agreement.test_graph_fingerprint import Net, fingerprints\n"
        "print(fingerprints(Net(), [(torch.ones(5, 8),)])[0].digest)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONHASHSEED": "7", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == fingerprints(Net(), [(torch.ones(4, 8),)])[0].digest
