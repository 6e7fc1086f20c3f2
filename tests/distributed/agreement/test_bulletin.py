"""Entries that no rank has made, a store that says nothing any longer, and the secret that ranks share."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.agreement import bulletin as bulletins
from gradsplit.distributed.agreement.bulletin import Bulletin, StoreLost
from gradsplit.distributed.agreement.rank_process import this_process
from gradsplit.distributed.agreement.session import ARRIVED, meet
from tests.distributed.agreement.handed_out import HandedOut

SECRET = b"a secret of the job"


def bulletin_over(store: Store) -> Bulletin:
    bulletin = Bulletin(store)
    bulletin.enter(SECRET)
    return bulletin


def entry(store: Store, name: str) -> tuple[Store, str]:
    """Where everybody may write."""
    return PrefixStore(f"gradsplit/{bulletin_over(store).session}", store), name


@pytest.mark.parametrize(
    "made_up",
    [b"", b"no JSON", json.dumps("rank 1 failed").encode(), b"\xff" * 100, b"0" * 64 + b'"rank 1 failed"'],
)
def test_what_no_rank_has_made_is_ignored(made_up: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    mine, other = bulletin_over(store), bulletin_over(store)
    open_store, name = entry(store, "failure")
    open_store.set(name, made_up)
    with caplog.at_level(logging.WARNING):
        assert mine.read_if_there(name) is None
        assert mine.read_if_there(name) is None
    assert len(caplog.records) == 1 and "that no rank has made" in caplog.text
    # Nor does it keep ranks from posting theirs.
    assert mine.post_first(name, "a fault") == "a fault"
    assert other.post_first(name, "another") == "a fault"


def test_an_entry_is_good_for_its_name_and_its_session_only() -> None:
    store = HashStore()
    mine = bulletin_over(store)
    mine.post("doing", "compiles")
    open_store, name = entry(store, "doing")
    signed = open_store.get(name)
    open_store.set("failure", signed)
    assert mine.read_if_there("failure") is None and mine.read("doing") == "compiles"
    later = Bulletin(store)
    later.enter(b"another secret")
    assert not later.has("doing")


def test_the_secret_is_nowhere_in_the_store_and_no_state_of_the_program() -> None:
    states = random.getstate(), torch.get_rng_state()
    store, handed_out = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), HandedOut()
    ranks = [Bulletin(store.clone()) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        for rank, bulletin in enumerate(ranks):
            turns = iter(partial(time.sleep, 0.01), "never")
            threads.submit(meet, bulletin, rank, range(2), handed_out.by(rank), turns, absent)
    ranks[0].post("a", "b")
    assert ranks[1].read("a") == "b"
    secret = ranks[0]._secret
    assert len(secret) == 32 and ranks[1]._secret == secret
    for key in store.list_keys():
        assert secret not in store.get(key) and secret.hex().encode() not in store.get(key) + key.encode()
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def absent(ranks: Sequence[int], has_ended: bool) -> str:
    return f"{list(ranks)} {has_ended}"


def word(**said: Any) -> dict[str, Any]:
    return {"beat": 1, "process": this_process(), "host": "here", "doing": "", "place": "", **said}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # Rank 0 has arrived, rank 1 lives, and nothing is heard of rank 3.
        ({0: word(doing=ARRIVED), 1: word()}, r"\[1, 3\] False"),
        (
            {1: word(left="was ended by ValueError: no data (a.py:3)")},
            "rank 1 .* on here.* was ended by ValueError",
        ),
        # What anybody may have written.
        ({1: b"no JSON", 3: word(process=["", "../1", ""])}, r"\[0, 1, 3\] False"),
        ({1: [], 3: {"left": True}}, r"\[0, 1, 3\] False"),
    ],
)
def test_a_rank_that_does_not_come_to_the_meeting_is_named(said: dict[int, Any], expected: str) -> None:
    store = HashStore()
    for rank, value in said.items():
        if isinstance(value, bytes):
            store.set(f"gradsplit/alive/{rank}", value)
        else:
            Bulletin(store).post_openly(f"alive/{rank}", value)
    with pytest.raises(CompileError, match=expected):
        meet(Bulletin(store), 2, range(4), HandedOut(4).by(2), iter([None]), absent)


_HOLDER = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], Store]]:
    """A process that holds a store, and the store."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    yield process, PrefixStore("group", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    process.kill()
    process.communicate()


def test_a_store_that_ends_before_it_is_opened(holder: tuple[subprocess.Popen[str], Store]) -> None:
    """Torch would try to connect for five minutes."""
    process, store = holder
    process.kill()
    process.wait()
    began_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"rank 0, .* has ended"):
        Bulletin(store)
    assert time.monotonic() - began_s < 2


def test_a_store_that_ends_or_is_stopped_while_it_is_opened(
    holder: tuple[subprocess.Popen[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulletins, "SILENCE_S", 1.0)
    process, store = holder
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(StoreLost, match="has not answered for 1 s: it has been stopped"):
        Bulletin(store)
    os.kill(process.pid, signal.SIGCONT)

    def connect_and_end(over: Store) -> socket.socket | None:
        connection = connect(over)
        process.kill()
        process.wait()
        return connection

    connect = bulletins._connection_to
    monkeypatch.setattr(bulletins, "_connection_to", connect_and_end)
    with pytest.raises(StoreLost, match="has ended"):
        Bulletin(store)


def test_a_store_that_is_stopped_blocks_nobody(
    holder: tuple[subprocess.Popen[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulletins, "SILENCE_S", 1.0)
    process, store = holder
    bulletin = bulletin_over(store)
    bulletin.post("a", 1)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(StoreLost, match=r"rank 0, .* has not answered for 1 s: it has been stopped") as lost:
        bulletin.read("a")
    assert not lost.value.has_ended
    os.kill(process.pid, signal.SIGCONT)
    assert bulletin.read("a") == 1
    process.kill()
    process.wait()
    time.sleep(0.1)
    with pytest.raises(StoreLost, match=r"rank 0, .* has ended") as lost:
        bulletin.read("a")
    assert lost.value.has_ended
