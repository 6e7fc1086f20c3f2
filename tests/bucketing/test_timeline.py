import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsplit.bucketing import Interval, Timeline


def compute(start, end):
    return Interval("compute", "segment", start, end)


def all_reduce(start, end):
    return Interval("all_reduce", "bucket", start, end, bytes=1024)


def test_overlap_and_exposure():
    timeline = Timeline((compute(0, 2), compute(3, 4), all_reduce(1, 3.5), all_reduce(3.25, 5)))
    assert timeline.compute_ms == pytest.approx(3000)
    assert timeline.all_reduce_ms == pytest.approx(4000)
    assert timeline.overlap_ms == pytest.approx(2000)
    assert timeline.exposed_ms == pytest.approx(2000)
    assert (timeline.start_s, timeline.end_s) == (0, 5)


def test_without_intervals_all_is_zero():
    timeline = Timeline(())
    assert (timeline.overlap_ms, timeline.exposed_ms, timeline.start_s, timeline.end_s) == (0, 0, 0, 0)


whole_seconds = st.lists(
    st.tuples(st.sampled_from([compute, all_reduce]), st.integers(0, 30), st.integers(0, 8)), max_size=12
)


@given(whole_seconds)
def test_agrees_with_counting_seconds(drawn):
    timeline = Timeline(tuple(make(start, start + length) for make, start, length in drawn))
    busy = {"compute": set(), "all_reduce": set()}
    for interval in timeline.intervals:
        busy[interval.kind].update(range(int(interval.start_s), int(interval.end_s)))
    assert timeline.overlap_ms == pytest.approx(1e3 * len(busy["compute"] & busy["all_reduce"]))
    assert timeline.exposed_ms == pytest.approx(1e3 * len(busy["all_reduce"] - busy["compute"]))


@pytest.mark.parametrize(("start", "end"), [(1, 0), (0, float("nan")), (float("-inf"), 0)])
def test_impossible_intervals_are_refused(start, end):
    with pytest.raises(ValueError, match="interval 'segment'"):
        compute(start, end)


def test_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    Timeline((all_reduce(100.25, 100.5), compute(100.0, 100.375))).write_chrome_trace(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"} == {
        "compute": 1,
        "all-reduce": 2,
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in complete] == [
        (1, 0, 375_000),
        (2, 250_000, 250_000),
    ]
    assert complete[1]["args"] == {"bytes": 1024}
