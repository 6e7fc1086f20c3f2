import struct

import pytest

from gradsplit.bucketing import Interval, Timeline, plot_timeline
from gradsplit.bucketing.plot_timeline import stack_flags, stack_rows


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", header[16:24])


@pytest.mark.parametrize("bucket_count", [0, 1, 12])
def test_writes_a_png(tmp_path, bucket_count):
    intervals = []
    for index in range(bucket_count):
        start_s = 100 + index / 1e3
        intervals.append(Interval("compute", f"backward {index}", start_s, start_s + 0.9e-3))
        intervals.append(Interval("all_reduce", f"bucket {index}", start_s, start_s + 2.5e-3, 1 << 20))
    path = tmp_path / "timeline.png"
    plot_timeline(Timeline(tuple(intervals)), path)
    width, height = png_size(path)
    assert 1500 < width < 2500
    assert 300 < height < 1500


def test_rows_hold_no_overlaps():
    assert stack_rows([(0, 2), (1, 3), (2, 4), (2.5, 5), (3, 6)]) == [0, 1, 0, 2, 1]


def test_a_flag_flies_above_the_poles_its_text_crosses():
    # The text of the first crosses the second's pole, that of the second nothing.
    assert stack_flags([0, 5, 20], [10, 10, 10]) == [2, 1, 1]
    assert stack_flags([0, 1, 2], [10, 10, 10]) == [3, 2, 1]
    assert stack_flags([], []) == []
