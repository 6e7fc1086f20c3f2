"""Ready times from marks of a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsplit.distributed.collectives import measure_costs
from gradsplit.distributed.collectives.measure_costs import ReadyTimes, measure_link
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer


class SteppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def let_host_get_ahead(self) -> None:
        pass


class DeviceBehindHost(SteppedClock):
    """A device on which all queued work takes one second more than the host took to queue it."""

    def __init__(self) -> None:
        super().__init__()
        self._queued = 0

    def mark(self) -> float:
        self._queued += 1
        return self.now_s + self._queued

    def seconds(self, start: float, end: float) -> float:
        self.now_s = max(self.now_s, end)
        return end - start


def use(clock: SteppedClock, monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    monkeypatch.setattr(measure_costs, "clock_of", lambda device: clock)
    monkeypatch.setattr(measure_costs, "perf_counter", lambda: clock.now_s)
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    return use(SteppedClock(), monkeypatch)


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


def test_medians_over_rounds(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    for slower in (1.0, 9.0, 2.0):
        run_round(times, clock, [(slower, ["b"]), (slower + 1, ["a"])], slower + 2)
    assert times.computed(["a", "b"]) == ([3.0, 2.0], 4.0)


def test_a_gradient_is_ready_at_its_last_contribution(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    run_round(times, clock, [(1.0, ["tied", "b"]), (3.0, ["tied"])], 4.0)
    assert times.computed(["tied", "b"]) == ([3.0, 1.0], 4.0)


def test_what_did_not_come_is_ready_at_the_end(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    run_round(times, clock, [(1.0, ["a"])], 4.0)
    assert times.computed(["a", "unused"]) == ([1.0, 4.0], 4.0)
    assert times.queued(["a", "unused"]) == ([1.0, 4.0], 4.0)


def test_how_far_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = use(DeviceBehindHost(), monkeypatch)
    times = ReadyTimes(torch.device("cpu"))
    # The host queues these 1, 2 and 3 seconds behind the begin, which the device comes to a second later, and to
    # each of them one second later still.
    run_round(times, clock, [(1.0, ["a"]), (2.0, ["b"])], 3.0)
    assert times.computed(["a", "b"]) == ([2.0, 4.0], 6.0)
    assert times.queued(["a", "b"]) == ([0.0, 1.0], 2.0)


def test_what_starting_an_all_reduce_takes(clock: SteppedClock) -> None:
    times = ReadyTimes(torch.device("cpu"))
    for seconds, count in ((6.0, 3), (8.0, 2), (2.0, 2)):
        run_round(times, clock, [(1.0, ["a"])], 4.0)
        clock.now_s += seconds
        times.all_started(count)
        clock.now_s += 1
    assert times.start_s == 2.0


class Link:
    """Averages in known times: a start-up, and for each byte."""

    def __init__(self, clock: SteppedClock, seconds_per_byte: float = 1e-9) -> None:
        self.clock, self.seconds_per_byte = clock, seconds_per_byte
        self.started: list[int] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> SharedBuffer:
        return SharedBuffer([torch.zeros(numel, dtype=dtype, device=device)], 0)

    def start(self, flat: torch.Tensor, buffer: SharedBuffer) -> Link:
        assert flat.data_ptr() == buffer.mine.data_ptr()
        self.clock.now_s += 1e-5 + self.seconds_per_byte * flat.nbytes
        self.started.append(flat.numel())
        return self

    def wait(self) -> None:
        pass


def test_links_are_measured(clock: SteppedClock) -> None:
    averaging: Any = Link(clock)
    link = measure_link(averaging, torch.device("cpu"), 2**24)
    assert (link.startup_s, link.seconds_per_byte) == pytest.approx((1e-5, 1e-9), rel=1e-6)


def test_a_small_models_link_is_measured(clock: SteppedClock) -> None:
    averaging: Any = Link(clock)
    assert measure_link(averaging, torch.device("cpu"), 64).startup_s > 0


def test_ranks_average_alike_whatever_they_measure(clock: SteppedClock) -> None:
    started = []
    for seconds_per_byte in (1e-9, 0.0):
        averaging: Any = Link(clock, seconds_per_byte)
        measure_link(averaging, torch.device("cpu"), 2**20)
        started.append(averaging.started)
    assert started[0] == started[1]
