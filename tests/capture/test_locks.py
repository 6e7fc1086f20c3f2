"""Locks of ``threading``: held while what they protect is read, computed and stored, and let go of afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.capture.same_as_plain import Graphs

LOCK, AGAIN = threading.Lock(), threading.RLock()
COUNT = [0]


def counted(x):
    with LOCK:
        COUNT[0] += 1
        y = x * COUNT[0]
    return y + 1


def by_hand(x):
    LOCK.acquire()
    try:
        COUNT[0] += 2
        return x * COUNT[0]
    finally:
        LOCK.release()


def twice(x):
    with AGAIN, AGAIN:
        y = x * 2
    with LOCK:
        return y + 1


def only_if_free(x):
    if LOCK.acquire(blocking=False):
        y = x * 2
        LOCK.release()
        return y
    return x * 3


def left_by_an_exception(x):
    try:
        with LOCK:
            x = x * 2
            raise ValueError
    except ValueError:
        return x + LOCK.locked()


def made_in_the_frame(x):
    own = threading.Lock()
    with own, threading.RLock():
        return x * 2 + own.locked()


PROGRAMS = [counted, by_hand, twice, only_if_free, left_by_an_exception, made_in_the_frame]


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_plain(program):
    found = []
    for function in (program, gradsplit.compile(program, backend="eager")):
        COUNT[0] = 0
        found.append([(function(torch.ones(2)), COUNT[0], LOCK.locked()) for _ in range(3)])
        assert not AGAIN._is_owned()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("program", [counted, by_hand])
def test_what_is_done_while_it_is_held_and_afterwards_is_one_graph(program):
    graphs = Graphs()
    gradsplit.compile(program, backend=graphs)(torch.ones(2))
    assert graphs.count == 1


class Held:
    """A lock is held whenever this is read or stored."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0

    def step(self, x):
        with self.lock:
            self.number = self.number + 1
            return x * self.number


def test_no_thread_comes_between():
    held, ended = Held(), []
    step = gradsplit.compile(held.step, backend="eager", dynamic=True)
    step(torch.ones(2)), step(torch.ones(2))

    def run():
        for _ in range(200):
            step(torch.ones(2))
        ended.append(True)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 3 and held.number == 602


def test_a_lock_that_is_not_held_is_not_let_go_of():
    def program(x):
        LOCK.release()
        return x * 2

    with pytest.raises(Unsupported, match="let go of by who has it not"):
        gradsplit.compile(program, backend="eager", fullgraph=True)(torch.ones(2))
    compiled = gradsplit.compile(program, backend="eager")
    LOCK.acquire()
    compiled(torch.ones(2))
    assert not LOCK.locked()
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        compiled(torch.ones(2))
