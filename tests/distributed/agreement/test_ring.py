"""What a rank makes of what the one before it says, or does not say any longer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from gradsplit.distributed.agreement import rank_process, ring
from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.ring import Neighbour


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ring, "time", clock)
    return clock


@pytest.fixture
def bulletin() -> Bulletin:
    bulletin = Bulletin(HashStore())
    bulletin.enter(b"secret")
    return bulletin


def operations_of(*begun: str) -> Operations:
    operations = Operations(lambda: 0, lambda _: True)
    for what in begun:
        operations.begin(what)
    return operations


def neighbour_of(rank: int, size: int, *begun: str) -> Neighbour:
    return Neighbour(rank, range(size), operations_of(*begun))


def say(
    bulletin: Bulletin,
    rank: int,
    beat: int,
    process: list[str],
    doing: str = "compiles a graph",
    **more: Any,
) -> None:
    said = {
        "beat": beat,
        "doing": doing,
        "place": "train.py:3 in train",
        "process": process,
        "host": "here",
        **more,
    }
    bulletin.post(f"alive/{rank}", said)


def look_for(
    neighbour: Neighbour,
    bulletin: Bulletin,
    clock: Clock,
    seconds: int,
    each: Callable[[int], None] | None = None,
) -> str:
    for second in range(seconds):
        if each is not None:
            each(second)
        clock.now_s += 1
        if found := neighbour.look(bulletin):
            return f"after {second} s: {found}"
    return ""


def another_process() -> tuple[subprocess.Popen[bytes], list[str]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return process, [
        rank_process.this_process()[0],
        str(process.pid),
        rank_process._stat(str(process.pid))[1],
    ]


def test_a_rank_that_speaks_is_waited_for_however_long(bulletin: Bulletin, clock: Clock) -> None:
    """As one that compiles for ten minutes. One that has not come has not begun to speak."""
    neighbour = neighbour_of(2, 3)
    assert not look_for(neighbour, bulletin, clock, 100)
    speaks = lambda second: say(bulletin, 1, second // 15, ["", "1", ""])  # noqa: E731
    assert not look_for(neighbour, bulletin, clock, 600, speaks)


def test_a_rank_of_another_machine_that_says_nothing_is_named(bulletin: Bulletin, clock: Clock) -> None:
    say(bulletin, 1, 7, ["another machine", "4711", "1"])
    found = look_for(neighbour_of(0, 2), bulletin, clock, 60)
    assert found.startswith(
        "after 19 s: rank 1 (process 4711 on here; last heard of: compiles a graph, at train.py:3"
    )
    assert "has said nothing for 18 s: it has stopped, or its machine cannot be reached" in found


def test_who_was_stopped_itself_names_nobody(bulletin: Bulletin, clock: Clock) -> None:
    say(bulletin, 1, 7, ["another machine", "4711", "1"])
    neighbour = neighbour_of(0, 2)
    assert not look_for(neighbour, bulletin, clock, 5)
    clock.now_s += 3600
    assert not look_for(neighbour, bulletin, clock, 5)


def test_of_a_process_on_this_machine_the_system_tells(bulletin: Bulletin, clock: Clock) -> None:
    process, description = another_process()
    neighbour = neighbour_of(0, 2)
    say(bulletin, 1, 1, description)
    # It starves, or somebody has Python's lock for long.
    assert not look_for(neighbour, bulletin, clock, 100)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert "it has been stopped, as by SIGSTOP" in look_for(neighbour, bulletin, clock, 2)
    say(bulletin, 1, 2, description)
    assert not look_for(neighbour, bulletin, clock, 17)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "has ended without a word" in look_for(neighbour, bulletin, clock, 1)
    process.wait()
    assert "has ended without a word" in look_for(neighbour, bulletin, clock, 1)
    process.communicate()


def test_after_a_rank_that_has_left_comes_the_one_before(bulletin: Bulletin, clock: Clock) -> None:
    neighbour = neighbour_of(0, 3)
    for rank in (1, 2):
        say(bulletin, rank, 1, ["another machine", "4711", "1"])
    assert not look_for(neighbour, bulletin, clock, 10)
    bulletin.post("alive/2", {"left": True})
    assert not look_for(neighbour, bulletin, clock, 2)
    assert "rank 1 " in look_for(neighbour, bulletin, clock, 60)
    bulletin.post("alive/1", {"left": True})
    assert not look_for(neighbour, bulletin, clock, 60)


def in_operation(
    number: int, what: str, collectives: int = 0, is_in: str = "", term: int = 0
) -> dict[str, Any]:
    report = f"{what} now"
    return {
        "term": term,
        "number": number,
        "what": what,
        "report": report,
        "collectives": collectives,
        "is_in": is_in,
    }


@pytest.mark.parametrize(
    ("theirs", "left", "expected"),
    [
        (in_operation(2, "averages b"), "", ""),  # as far as this rank
        (in_operation(3, "averages c"), "has ended", ""),  # farther
        (in_operation(1, "broadcasts", term=1), "has ended", ""),  # it has begun anew, and so will this one
        (
            in_operation(1, "broadcasts"),
            "",
            "after 0 s: rank 1 .* broadcasts now when rank 0 averages a; all ranks",
        ),
        (
            in_operation(1, "averages a"),
            "has ended",
            "after 2 s: rank 1 .* has ended.* while rank 0 averages b",
        ),
        (
            in_operation(1, "averages a", 1, "barrier"),
            "",
            "after 1. s: .* waits in barrier, while rank 0 averages b",
        ),
        # The barrier is one that this rank has begun.
        (in_operation(1, "averages a", 0, "barrier"), "", ""),
    ],
)
def test_who_is_waited_for_in_vain_is_named(
    theirs: dict[str, Any], left: str, expected: str, bulletin: Bulletin, clock: Clock
) -> None:
    neighbour = neighbour_of(0, 2, "averages a", "averages b")

    def lives(second: int) -> None:
        say(bulletin, 1, second, ["", "1", ""], operation=theirs, left=left if second else "")

    assert re.match(expected or "$", look_for(neighbour, bulletin, clock, 100, lives))


def test_a_rank_that_lives_is_waited_for_and_named_now_and_then(
    bulletin: Bulletin, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    neighbour = neighbour_of(0, 2, "averages a", "averages b")

    def lives(second: int) -> None:
        say(bulletin, 1, second, ["", "1", ""], operation=in_operation(1, "averages a"))

    assert not look_for(neighbour, bulletin, clock, 150, lives)
    assert [record.getMessage().split(": it")[0][-4:] for record in caplog.records] == [
        "21 s",
        "81 s",
        "41 s",
    ]
    assert "rank 0 has waited for rank 1 (process 1 on here; last heard of: compiles" in caplog.text


def test_who_broadcasts_waits_for_nobody(bulletin: Bulletin, clock: Clock) -> None:
    neighbour = neighbour_of(0, 2, "averages a")
    neighbour._operations.begin("broadcasts", is_answered=False)
    say(bulletin, 1, 1, ["", "1", ""], operation=in_operation(1, "averages a"), left="has ended")
    assert not look_for(neighbour, bulletin, clock, 5)
