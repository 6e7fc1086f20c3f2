"""Logs of single kinds of things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradsplit
from gradsplit.compile_core.artifact_logs import choose_logs, log_artifact
from gradsplit.compile_core.lowering.cpp_kernels import build_cpp
from gradsplit.compile_core.options import LOG_ARTIFACTS, chosen_logs


@pytest.fixture(autouse=True)
def nothing_chosen_afterwards() -> Iterator[None]:
    yield
    choose_logs(())


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch):
    assert chosen_logs() == set()
    monkeypatch.setenv("TORCH_LOGS", "+dynamo,guards,graph_sizes")
    monkeypatch.setenv("GRADSPLIT_LOGS", "recompiles, +cache")
    assert chosen_logs() == {"guards", "recompiles", "cache"}
    monkeypatch.setenv("GRADSPLIT_LOGS", "all,-output_code")
    assert chosen_logs() == set(LOG_ARTIFACTS) - {"output_code"}
    monkeypatch.setenv("GRADSPLIT_LOGS", "guard")
    with pytest.raises(
        ValueError, match=r"unknown name in GRADSPLIT_LOGS: 'guard'; did you mean 'guards'.*graph_breaks"
    ):
        chosen_logs()


def test_a_text_is_made_only_if_it_is_wanted(capsys: pytest.CaptureFixture[str]):
    log_artifact("guards", lambda: pytest.fail("made in vain"))
    assert not capsys.readouterr().err


def test_each_kind_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("GRADSPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(build_cpp, "_loaded", {})  # other tests' kernels may be the same
    choose_logs(LOG_ARTIFACTS)

    @gradsplit.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        gradsplit.graph_break()
        return torch.cumsum(y, 0).cos().sum()

    for rows in (3, 4, 5):
        step(torch.ones(rows, 5, requires_grad=True)).backward()
    said = capsys.readouterr().err
    for text in (
        "[gradsplit graph_breaks] ",
        "[gradsplit guards] ",
        "[gradsplit graph_code] ",
        "[gradsplit recompiles] ",
        "[gradsplit dynamic] sizes of x: 3 was first, now 4",
        "[gradsplit aot_graphs] ",
        "[gradsplit schedule] ",
        "[gradsplit fusion] ",
        "[gradsplit output_code] ",
        "[gradsplit perf_hints] ",
        "[gradsplit cache] ",
    ):
        assert text in said, text
    recompiled = said.partition("[gradsplit recompiles] ")[2].partition("\n[gradsplit")[0]
    assert (
        "not: x is a Tensor of float32[3, 5]" in recompiled
        and "; x is float32[4, 5] cpu\n  File" in recompiled
    )
    assert recompiled.endswith("in step\n    y = x.sin()")
