"""What a recorder makes of marks of a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from gradsplit.distributed.explaining.record_timeline import TimelineRecorder
from tests.distributed.collectives.test_measure_costs import SteppedClock


class SteppedRecorder(TimelineRecorder):
    """A bucket's all-reduce takes the seconds that are given as its work."""

    def __init__(self, clock: SteppedClock, one_at_a_time: bool) -> None:
        super().__init__(clock)
        self._one_at_a_time = one_at_a_time

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None:
        ended_s = self._starting + work
        self._spans.append(("all_reduce", f"bucket {bucket}", self._starting, ended_s, size_bytes))


@pytest.mark.parametrize(("one_at_a_time", "second_starts_s"), [(True, 7.0), (False, 3.0)])
def test_all_reduces_under_regions(one_at_a_time: bool, second_starts_s: float) -> None:
    clock = SteppedClock()
    clock.now_s = 10.0
    recorder = SteppedRecorder(clock, one_at_a_time)
    for region, (names, seconds) in enumerate([(["b"], 5.0), (["a"], 6.0)]):
        clock.now_s += 1
        recorder.region_started(f"region {region}")
        clock.now_s += 1
        recorder.region_finished(f"region {region}")
        recorder.gradients_arrived(names)
        recorder.collective_starting(region)
        recorder.collective_started(region, 4, seconds)
        clock.now_s -= 1
    found = [(interval.label, interval.start_s, interval.end_s) for interval in recorder.timeline().intervals]
    assert found == [
        ("region 0", 1.0, 2.0),
        ("bucket 0", 2.0, 7.0),
        ("region 1", 2.0, 3.0),
        ("bucket 1", second_starts_s, 9.0),
    ]
    assert recorder.arrived_s() == {"b": 2.0, "a": 3.0}
