"""``GRADSPLIT_REPRO_AFTER``: what programs leave whose graphs fail, alone and on ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.minimizer.write_failures import GraphFailures
from gradsplit.compile_core.options import ReproRequest, requested_repro
from tests.forked_ranks import run_forked
from tests.start_ranks import ROOT, start_ranks

_BACKENDS = """
import torch.distributed as dist

def _has(module, word):
    return any(word in str(node.target) for node in module.graph.nodes)

def raises(module, inputs):
    if _has(module, "cumsum"):
        raise KeyError("cumsum")
    return module

def raises_on_one_rank(module, inputs):
    return raises(module, inputs) if dist.get_rank() == 1 else module

def is_wrong(module, inputs):
    if not _has(module, "atan"):
        return module
    return lambda *given: tuple(result + 1.0 for result in module(*given))

def runs_once(module, inputs):
    calls = []
    def run(*given):
        calls.append(given)
        if _has(module, "cumsum"):
            raise TypeError(f"call {len(calls)} of cumsum")
        return module(*given)
    return run

def keeps_rows(module, inputs):
    rows = []
    def run(*given):
        rows.append(given[0].shape[0])
        return tuple(result[:rows[0]] for result in module(*given))
    return run
"""


def _environment(tmp_path: Path, after: str = "capture", level: int = 2) -> dict[str, str]:
    (tmp_path / "backends_of_mine.py").write_text(_BACKENDS)
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "GRADSPLIT_REPRO_AFTER": after,
        "GRADSPLIT_REPRO_LEVEL": str(level),
        "GRADSPLIT_REPRO_DIR": str(tmp_path / "out"),
    }


def _run(program: Path, environment: dict[str, str]) -> str:
    """What it says on stderr."""
    return run_forked([str(program)], program.parent, 280, **environment).stderr


def _written(folder: Path) -> set[str]:
    return {str(path.parent.relative_to(folder)) for path in folder.glob("**/repro.py")}


@pytest.mark.timeout(300)
def test_each_failure_of_a_program_leaves_one_smaller_program(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text("""
import torch, gradsplit, backends_of_mine
from contextlib import suppress
def of_the_main_file(module, inputs):
    raise KeyError("mine")
for backend in (of_the_main_file, backends_of_mine.raises, backends_of_mine.runs_once):
    step = gradsplit.compile(lambda x: x.sin().cumsum(0).cos(), backend=backend)
    for _ in range(3):
        with suppress(KeyError, TypeError):
            step(torch.randn(8, 8))
""")
    environment = _environment(tmp_path)
    # What the program's own process is asked for is not for those that it starts.
    record = tmp_path / "record"
    said = _run(program, {**environment, "GRADSPLIT_DEBUG": str(record)})
    assert said.count("1 calls that fail in the same way") == 2, said
    assert said.count("the backend 'of_the_main_file' is in the program's main file") == 1
    assert "KeyError: 'cumsum'" in said and "TypeError: call 1 of cumsum" in said
    assert _written(tmp_path / "out") == {".", "whole", "graph_2", "graph_2/whole"}
    assert "KeyError: 'cumsum'" in _run(tmp_path / "out" / "repro.py", environment)
    assert len([*record.iterdir()]) == 1


@pytest.mark.timeout(300)
def test_gradients_and_second_calls_are_tried_at_level_4(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text("""
import torch, gradsplit, backends_of_mine
gradsplit.compile(lambda x: x.sin().atan(), backend=backends_of_mine.is_wrong)(torch.randn(8, 8, requires_grad=True))
step = gradsplit.compile(lambda x: (x.cos() * x.shape[0]).sin(), backend=backends_of_mine.keeps_rows, dynamic=True)
for rows in (4, 8, 16):
    step(torch.randn(rows, 8))
""")
    said = _run(program, _environment(tmp_path, "aot", 4))
    out = tmp_path / "out"
    assert _written(out) == {".", "whole", "graph_2/whole", "graph_3", "graph_3/whole"}, said
    assert "torch.ops.aten.atan.default" in (out / "repro.py").read_text()
    second = (out / "graph_3" / "repro.py").read_text()
    assert "def again():" in second and "dynamic=True" in second and "has another shape" in second


_TRAINS_ON_RANKS = """
import torch, gradsplit, backends_of_mine
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Model(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).cumsum(0).sin().sum()

dist.init_process_group("gloo")
model = DistributedDataParallel(Model(torch.nn.Linear(8, 8)))
gradsplit.compile(model, backend=backends_of_mine.raises_on_one_rank)(torch.randn(4, 8))
"""


@pytest.mark.multi_process
@pytest.mark.timeout(300)
def test_the_rank_that_fails_leaves_a_program_of_ranks_before_the_job_ends(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(_TRAINS_ON_RANKS)
    run = start_ranks([str(program)], 200, **_environment(tmp_path))
    assert run.returncode != 0
    assert _written(tmp_path / "out") == {"rank_1", "rank_1/whole"}, run.stderr
    assert "raises: on rank 1 KeyError: 'cumsum'" in (tmp_path / "out" / "rank_1" / "repro.py").read_text()


class _WrittenGraphs(GraphFailures):
    """Notes what would be written."""

    def __init__(self, inputs: list[torch.Tensor], level: int) -> None:
        captured: Any = None
        super().__init__(
            captured, inputs, captured, captured, ReproRequest("capture", level, Path("nowhere"))
        )
        self.written: list[str] = []

    def _write(self, says: str, again: Sequence[Any] | None = None, what: str = "") -> None:
        self.written.append(says)


def test_a_second_call_is_one_with_other_sizes_layouts_or_types():
    x = torch.randn(4, 6)
    sparse = x.to_sparse()
    others = (x[:2], x.t(), x.double(), x.clone().requires_grad_(), sparse)
    same = [(x, (x, x + 1), 0), (sparse, (sparse, 2 * sparse), 0)]
    for first, later, count in [*same, *((x, (x, other, other, x[:3]), 1) for other in others)]:
        graph = _WrittenGraphs([first], 4)
        watched = graph.watched(lambda given: given)
        assert all(watched(given) is given for given in later)
        assert len(graph.written) == count


def test_what_the_environment_cannot_ask_for(monkeypatch: pytest.MonkeyPatch):
    assert requested_repro() is None
    monkeypatch.setenv("GRADSPLIT_REPRO_AFTER", "dynamo")
    request = requested_repro()
    assert request is not None and (request.after, request.level) == ("capture", 2)
    monkeypatch.setenv("GRADSPLIT_REPRO_LEVEL", "5")
    with pytest.raises(ValueError, match="GRADSPLIT_REPRO_LEVEL takes 1 to 4, not '5'"):
        requested_repro()
    monkeypatch.setenv("GRADSPLIT_REPRO_AFTER", "inductor")
    with pytest.raises(ValueError, match="takes capture or aot, not 'inductor'"):
        gradsplit.compile(lambda x: x)
