"""The table of many models' steps: what it says of those that were measured, and of those that were not."""

from __future__ import annotations

import time

from tests.bench.sweep_steps import Figures, Measured, Setting, markdown, measure_all

SETTING = Setting(("default",), is_trained=True, device="cpu", rows=1, batch=0)


def measured(name: str, ours_ms: float, theirs_ms: float) -> Measured:
    ours, theirs = Figures(5.0, 2.0, 1.0, ours_ms), Figures(20.0, 2.0, 1.0, theirs_ms)
    return Measured(name, {"gradsplit default": ours, "inductor default": theirs})


def test_slow_ones_come_first_and_what_was_not_measured_last() -> None:
    found = [measured("fast", 1.0, 2.0), measured("slow", 3.0, 2.0), Measured("broken", {}, "KeyError: 3")]
    lines = markdown(found, "default", {"late"}).splitlines()
    assert lines[2] == "| slow | 3.00 | 2.00 | 1.50 | 2.00 | 2.00 | 5 | 20 |"
    assert lines[3].startswith("| fast | 1.00 | 2.00 | 0.50 |")
    assert "- step: geometric mean 0.866, greatest 1.50, 1 at most 1.0, 1 above 1.05" in lines
    assert lines[-2:] == ["- not measured: broken (KeyError: 3)", "- out of time: late"]


def test_a_model_that_cannot_be_made_is_reported_and_nothing_starts_out_of_time() -> None:
    (failed,) = measure_all(["none of them"], SETTING, 1, time.monotonic() + 120)
    assert failed.error == "KeyError: 'none of them'"
    assert [*measure_all(["graph"], SETTING, 1, time.monotonic() - 1)] == []
