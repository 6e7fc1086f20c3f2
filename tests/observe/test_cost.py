"""What observes costs next to nothing while nothing is switched on; ``tests/bench/observe_cost.py`` has figures."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

import gradsplit
from tests.bench.observe_cost import compile_seconds, counted_calls, seconds_inside
from tests.bench.training_models import mlp

_OBSERVING = (
    "compile_core/observe/",
    "/minimizer/",
    "artifact_logs.py",
    "run_record.py",
    "record_captures.py",
)


def test_a_compiled_call_reaches_nothing_that_observes():
    compiled = gradsplit.compile(lambda x, n: (x.sin() * n).sum())
    x = torch.randn(4, 8, requires_grad=True)
    for n in (2, 3, 4):
        compiled(x, n).backward()
    reached: set[str] = set()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        reached.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        compiled(x, 5).backward()
    finally:
        sys.setprofile(None)
    assert any("/compiled_calls/" in file for file in reached)
    assert not [file for file in reached if any(part in file for part in _OBSERVING)], reached


def test_observers_take_less_than_a_hundredth_of_a_compilation():
    model, inputs = mlp()
    compiled = gradsplit.compile(model)

    def step() -> None:
        compiled(**inputs).backward()

    step()
    counts = counted_calls(lambda: compile_seconds(step))
    assert counts["timed"] > 10 and counts["_users_place"] > 10  # they are those that are measured
    inside = min(seconds_inside(lambda: compile_seconds(step)) for _ in range(5))
    assert inside < 0.01 * min(compile_seconds(step) for _ in range(3))
