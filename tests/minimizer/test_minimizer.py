"""The minimizer: parts of graphs, and programs with planted faults. ``planted_programs.py`` has forty of them."""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsplit
from gradsplit.compile_core.minimizer.minimize import minimize
from gradsplit.compile_core.minimizer.outcome import Outcome, outcome_of
from gradsplit.compile_core.minimizer.rank_trials import on_ranks
from gradsplit.compile_core.minimizer.reduce import fewer, fewer_calls, needed_passes, smaller_sizes
from gradsplit.compile_core.minimizer.subgraph import Candidate, values_of
from gradsplit.compile_core.minimizer.trials import in_a_fork
from gradsplit.compile_core.minimizer.write_repro import Settings
from gradsplit.minimize import attempt, captured, reproduce
from tests.minimizer.planted_faults import FAULTS
from tests.minimizer.planted_programs import minimized


def test_fewer_keeps_what_it_takes():
    for wanted in ({17}, {3, 40}, {0, 1, 99}):
        assert set(fewer(range(100), lambda part, wanted=wanted: wanted <= set(part))) == wanted


def test_passes_that_are_needed():
    names = [f"pass {k}" for k in range(11)]
    assert needed_passes(names, lambda skipped: True) == ()
    assert list(needed_passes(names, lambda skipped: "pass 7" not in skipped)) == ["pass 7"]


class _Chain(torch.nn.Module):
    def forward(self, x):
        for _ in range(5):
            x = x.tanh()
        first, second = x.reshape(4, 2, 3).split(1, dim=1)
        return first + second.sin(), x.add_(1.0)


def _has_sin(candidate: Candidate) -> bool:
    candidate.module(*candidate.inputs)
    return any("sin" in str(node.target) for node in candidate.module.graph.nodes)


def test_a_graph_gets_smaller_in_calls_and_in_sizes():
    candidate = captured(_Chain(), [torch.randn(4, 6)])
    small = fewer_calls(candidate, values_of(candidate), _has_sin)
    assert [node.target for node in small.calls] == ["sin"]
    (value,) = smaller_sizes(small, _has_sin).inputs
    assert value.shape == (1, 1, 1)


def test_trials_survive_what_they_try():
    assert in_a_fork(lambda: os.abort(), 20.0).is_like(Outcome("crashes", "SIGABRT"))
    assert in_a_fork(lambda: os._exit(3), 20.0).is_like(Outcome("crashes", "exit 3"))
    said = in_a_fork(lambda: [os.write(2, b"one\n  what():  the reason\ntwo\n"), os.abort()], 20.0)
    assert str(said) == "crashes: SIGABRT: what():  the reason"
    assert in_a_fork(lambda: time.sleep(60), 0.5).is_like(Outcome("hangs"))
    began = time.monotonic()
    assert in_a_fork(lambda: time.sleep(60), 60.0, 1.0).is_like(Outcome("hangs"))
    assert time.monotonic() - began < 20
    assert in_a_fork(lambda: Outcome("equal"), 20.0) == Outcome("equal")


def test_ranks_that_differ_crash_or_wait_for_one_that_does_not_come():
    def tried(acts: Callable[[int], Outcome | None]) -> Outcome:
        return in_a_fork(
            lambda: on_ranks(lambda: acts(dist.get_rank()) or Outcome("equal"), 2), 60.0, idle_limit_s=3.0
        )

    assert tried(lambda rank: dist.barrier()) == Outcome("equal")
    # The other rank fails, too, since this one leaves.
    assert str(tried(lambda rank: Outcome("differs", "a", "b") if rank == 1 else dist.barrier())) == (
        "differs: on rank 1 b"
    )
    crashed = tried(lambda rank: os.abort() if rank == 1 else dist.barrier())
    assert crashed.is_like(Outcome("crashes", "SIGABRT", rank=1))
    assert tried(lambda rank: dist.barrier() if rank == 0 else None).is_like(Outcome("hangs"))


def first_rows(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend whose code is for the sizes that it was compiled for, as generated code is."""
    rows = inputs[0].shape[0]
    return lambda *given: tuple(result[:rows] for result in module(*given))


class _Rows(torch.nn.Module):
    def forward(self, x):
        for _ in range(9):
            x = x.sin()
        return x


def test_a_guard_that_is_too_lax_is_made_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    candidate = captured(_Rows(), [torch.randn(4, 6)], [torch.randn(8, 6)])
    settings = Settings(f"{__name__}:first_rows", level=4)
    assert attempt(candidate, settings) == Outcome("equal")
    gradsplit.reset()
    FAULTS["more rows pass a guard"].plant(monkeypatch.setattr)
    found = minimize(candidate, settings, attempt, tmp_path)
    assert found.outcome.what == "result has another shape" and len(found.candidate.calls) == 1
    assert found.path is not None and "def again():" in found.path.read_text()
    written = runpy.run_path(str(found.path))
    with pytest.raises(AssertionError, match="the result 0 has another shape"):
        reproduce(written["Program"](), written["inputs"](), written["SETTINGS"], written["again"]())


def raises_at_sin(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend without a rule."""
    if any("sin" in str(node.target) for node in module.graph.nodes):
        raise KeyError("sin")
    return module


def test_what_fails_on_one_rank_alone_is_written_for_one(tmp_path: Path):
    candidate = captured(_Rows(), [torch.randn(4, 6)])
    found = minimize(candidate, Settings(f"{__name__}:raises_at_sin", ranks=2), attempt, tmp_path)
    assert found.outcome.is_like(Outcome("raises", "KeyError: 'sin'")) and found.settings.ranks == 1


def test_a_failure_is_told_from_another():
    candidate = captured(_Chain(), [torch.randn(4, 6)])

    def fail(message: str) -> Outcome:
        def compile_graph(module, inputs):
            raise ValueError(message)

        return outcome_of(candidate.module, candidate.inputs, compile_graph, False)

    assert fail("no rule for sin_3 of [4, 6] in /a/b.py").is_like(
        fail("no rule for sin_12 of [1, 2, 3] in /c.py")
    )
    assert not fail("no rule").is_like(fail("no kernel"))


def test_values_are_compared_with_float64():
    candidate = captured(_Chain(), [torch.randn(4, 6, dtype=torch.float64)])
    inputs = candidate.inputs

    def shifted(by: float):
        return lambda module, inputs: lambda *given: tuple(result + by for result in module(*given))

    assert outcome_of(candidate.module, inputs, shifted(0.0), True).kind == "equal"
    assert outcome_of(candidate.module, inputs, shifted(1e-5), True).what == "result has other values"
    assert (
        outcome_of(candidate.module, inputs, shifted(float("nan")), True).what
        == "result has no numbers at other places"
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "after"),
    [("kernel of atan", "aot"), ("aborted at flip", "capture"), ("pass overwrite_inputs raises", "capture")],
)
def test_a_planted_fault_is_all_that_is_left(name: str, after: str, tmp_path: Path):
    assert name in FAULTS
    found = minimized(name, 12, tmp_path, after)
    assert found.fails_alone and 0 < found.calls <= 5, found.said
