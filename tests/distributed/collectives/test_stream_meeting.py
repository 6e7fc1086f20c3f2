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

from gradsplit.distributed.collectives import stream_meeting
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer
from gradsplit.distributed.collectives.stream_meeting import StreamMeeting

CLOCK = 2**32


def word_at(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class Queue:
    """Does at once what a stream would do later."""

    def write(self, address: int, value: int) -> None:
        word_at(address).value = value

    def wait(self, address: int, value: int) -> None:
        deadline_s = time.monotonic() + 30
        while (word_at(address).value - value) % CLOCK >= CLOCK // 2:
            assert time.monotonic() < deadline_s
            time.sleep(1e-5)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Sequence[StreamMeeting]]:
    """Makes one of each rank, over words that all see."""

    def make(ranks: int) -> Sequence[StreamMeeting]:
        words = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]

        def share(numel: int, dtype: torch.dtype, group: Any, device: torch.device) -> SharedBuffer:
            assert numel == group.words.mine.numel()
            return group.words

        monkeypatch.setattr(stream_meeting, "share", share)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *arguments, **keywords: None)
        groups: list[Any] = [
            SimpleNamespace(words=SharedBuffer(words, rank), size=lambda: ranks) for rank in range(ranks)
        ]
        queues: list[Any] = [Queue() for _ in groups]
        return [
            StreamMeeting(group, torch.device("cpu"), queue)
            for group, queue in zip(groups, queues, strict=True)
        ]

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
    made.release_waits()
    waiting.join(5)
    assert not waiting.is_alive()
    made()  # nor does it wait for anybody later


def test_it_is_rehearsed_alone(meetings: Callable[[int], Sequence[StreamMeeting]]) -> None:
    meetings(2)[0].rehearse()
