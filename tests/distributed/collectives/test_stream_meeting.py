"""Meetings of streams: ranks are threads here, a stream is its thread, and the driver is written in Python."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.collectives import stream_meeting
from distributed.collectives.shared_buffers import SharedBuffer
from distributed.collectives.stream_meeting import StreamMeeting

CLOCK = 2**32


def word_at(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def write(stream: int, address: int, value: int, flags: int) -> int:
    word_at(address).value = value
    return 0


def wait(stream: int, address: int, value: int, flags: int) -> int:
    deadline_s = time.monotonic() + 30
    while (word_at(address).value - value) % CLOCK >= CLOCK // 2:
        assert time.monotonic() < deadline_s
        time.sleep(1e-5)
    return 0


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Sequence[StreamMeeting]]:
    """Makes one of each rank, over words that all see."""

    def make(ranks: int) -> Sequence[StreamMeeting]:
        words = [torch.zeros(2 * ranks, dtype=torch.int32) for _ in range(ranks)]
        driver = SimpleNamespace(
            cuStreamWriteValue32_v2=lambda *arguments: write(*arguments),
            cuStreamWaitValue32_v2=lambda *arguments: wait(*arguments),
        )
        monkeypatch.setattr(stream_meeting.ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(stream_meeting, "share", lambda numel, dtype, group, device: group.words)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *arguments, **keywords: None)
        groups: list[Any] = [
            SimpleNamespace(words=SharedBuffer(words, rank), size=lambda: ranks) for rank in range(ranks)
        ]
        stream: Any = SimpleNamespace(cuda_stream=0)
        return [StreamMeeting(group, torch.device("cpu"), stream) for group in groups]

    return make


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("first", [0, CLOCK // 2 - 3, CLOCK - 3])
def test_nobody_goes_on_before_all_have_come(
    ranks: int, first: int, meetings: Callable[[int], Sequence[StreamMeeting]]
) -> None:
    """Also where the numbers of meetings begin again."""
    came = [0] * ranks

    def run(rank: int, meeting: StreamMeeting) -> None:
        for number in range(1, 9):
            came[rank] = number
            meeting()
            assert min(came) >= number

    made = meetings(ranks)
    for meeting in made:
        meeting._met = first
        for word in meeting._from_others:
            word_at(word).value = first
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks), made))


@pytest.mark.parametrize("first", [0, CLOCK // 4, CLOCK // 2 - 1, CLOCK - 2])
def test_one_that_waits_in_vain_is_let_go(
    first: int, meetings: Callable[[int], Sequence[StreamMeeting]]
) -> None:
    made = meetings(2)[0]
    made._met = first
    for word in made._from_others:
        word_at(word).value = first
    waiting = threading.Thread(target=made, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    made.let_go()
    waiting.join(5)
    assert not waiting.is_alive()
    made()  # nor does it wait for anybody later


def test_what_one_tells_the_others_know_until_it_tells_another_number(
    monkeypatch: pytest.MonkeyPatch, meetings: Callable[[int], Sequence[StreamMeeting]]
) -> None:
    first, second, third = meetings(3)
    written: list[int] = []

    def noted(stream: int, address: int, value: int, flags: int) -> int:
        written.append(value)
        return write(stream, address, value, flags)

    monkeypatch.setattr(first, "_write", noted)
    for number in (2, 2, 4, 4, 2):
        first.tell(number)
        second.tell(7)
        assert [rank.told_by(0).tolist() for rank in (second, third)] == [[number], [number]]
        assert third.told_by(1).tolist() == [7]
    # What others know already takes no operation of the stream.
    assert written == [2, 2, 4, 4, 2, 2]


def test_a_driver_that_cannot_says_so(
    monkeypatch: pytest.MonkeyPatch, meetings: Callable[[int], Sequence[StreamMeeting]]
) -> None:
    made = meetings(2)[0]
    made.rehearse()
    monkeypatch.setattr(made, "_wait", lambda *arguments: 801)
    with pytest.raises(RuntimeError, match=r"queues no operations on memory \(CUDA error 801\)"):
        made.rehearse()
