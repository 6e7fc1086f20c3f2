"""Ready times from marks of a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.collectives import measure_costs
from distributed.collectives.measure_costs import ReadyTimes, measure_link
from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer


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
    """Averages in known times: a start-up, one more where 16 bits are sent, and for each byte."""

    def __init__(self, clock: SteppedClock, seconds_per_byte: float = 1e-9) -> None:
        self.clock, self.seconds_per_byte = clock, seconds_per_byte
        self.started: list[tuple[int, int]] = []

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, narrow: NarrowPart | None = None
    ) -> SharedBuffer:
        return SharedBuffer([torch.zeros(numel, dtype=dtype, device=device)], 0, narrow)

    def start(self, flat: torch.Tensor, buffer: SharedBuffer, values: torch.Tensor | None = None) -> Link:
        assert flat.data_ptr() == buffer.mine.data_ptr()
        narrow = 0 if values is None else values.numel()
        if values is not None:
            assert buffer.narrow == NarrowPart(narrow, values.dtype) and narrow % 16 == 0
        bytes_counted = 4 * (flat.numel() - narrow) + 0.6 * 4 * narrow
        self.clock.now_s += 1e-5 + (3e-5 if narrow else 0) + self.seconds_per_byte * bytes_counted
        self.started.append((flat.numel(), narrow))
        return self

    def wait(self) -> None:
        pass


def test_links_are_measured(clock: SteppedClock) -> None:
    averaging: Any = Link(clock)
    wide = measure_link(averaging, torch.device("cpu"), 2**24)
    assert (wide.startup_s, wide.seconds_per_byte) == pytest.approx((1e-5, 1e-9), rel=1e-6)
    assert wide.narrow_share == 1.0
    mixed = measure_link(averaging, torch.device("cpu"), 2**24, torch.bfloat16)
    found = mixed.startup_s, mixed.seconds_per_byte, mixed.narrow_share
    assert found == pytest.approx((4e-5, 1e-9, 0.6), rel=1e-6)


def test_a_small_models_link_is_measured(clock: SteppedClock) -> None:
    averaging: Any = Link(clock)
    link = measure_link(averaging, torch.device("cpu"), 64, torch.bfloat16)
    assert link.startup_s > 0 and 0 < link.narrow_share <= 1


def test_ranks_average_alike_whatever_they_measure(clock: SteppedClock) -> None:
    started = []
    for seconds_per_byte in (1e-9, 0.0):
        averaging: Any = Link(clock, seconds_per_byte)
        link = measure_link(averaging, torch.device("cpu"), 2**20, torch.bfloat16)
        assert 0 < link.narrow_share <= 1
        started.append(averaging.started)
    assert started[0] == started[1]
