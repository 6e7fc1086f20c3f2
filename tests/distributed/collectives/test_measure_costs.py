"""Ready times from marks of a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.collectives import measure_costs
from distributed.collectives.measure_costs import ReadyTimes


class SteppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, start: Any, end: Any) -> float:
        return end - start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    clock = SteppedClock()
    monkeypatch.setattr(measure_costs, "clock_of", lambda device: clock)
    return clock


def run_round(
    times: ReadyTimes, clock: SteppedClock, arrivals: list[tuple[float, list[str]]], end_s: float
) -> None:
    began_s = clock.now_s
    times.round_began()
    for at_s, names in arrivals:
        clock.now_s = began_s + at_s
        times.gradients_arrived(names)
    clock.now_s = began_s + end_s
    times.all_computed()
    clock.now_s += 1


def test_medians_over_rounds(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    for slower in (1.0, 9.0, 2.0):
        run_round(times, clock, [(slower, ["b"]), (slower + 1, ["a"])], slower + 2)
    assert times.medians(["a", "b"]) == ([3.0, 2.0], 4.0)


def test_a_gradient_is_ready_at_its_last_contribution(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    run_round(times, clock, [(1.0, ["tied", "b"]), (3.0, ["tied"])], 4.0)
    assert times.medians(["tied", "b"]) == ([3.0, 1.0], 4.0)


def test_what_did_not_come_is_ready_at_the_end(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    run_round(times, clock, [(1.0, ["a"])], 4.0)
    assert times.medians(["a", "unused"]) == ([1.0, 4.0], 4.0)
