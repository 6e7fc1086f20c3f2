"""Ranks meet before their first round: the first hands out a secret, by which entries in the store are known as theirs.

It goes by a collective of the process group, between the ranks' own connections: the store is open to everybody who can
reach it, and may have entries of process groups before. It is a sum, so that nobody gets on before all have come.
Meanwhile ranks say in the store, openly, that they live and where they are, so that those who do not come can be named.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.agreement.bulletin import Bulletin, StoreLost
from gradsplit.distributed.agreement.rank_process import State, state_of
from gradsplit.distributed.agreement.ring import Watched, describe

_SECRET_BYTES = 32
# How often a rank looks after the others, and after how many.
_LOOK_S, _LOOKS = 1.0, 32
# How long one whose connection has ended looks for who has ended.
_EXPLAIN_S = 4.0
_ENDED = (State.GONE, State.STOPPED)
# What a rank does that waits here for the others.
ARRIVED = "waits for the other ranks"


@dataclass(frozen=True)
class HandOut:
    """A collective that adds up what ranks have: zeros, but for the first of the group.

    Attributes:
        begin: begins it, and gives a ``torch.distributed.Work``.
        device: of the tensors that it takes.
        collectives: how many the group has begun on this rank.
    """

    begin: Callable[[torch.Tensor], Any]
    device: torch.device
    collectives: Callable[[], int]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """One on which the group can do so: the CPU, where it may."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def meet(
    bulletin: Bulletin,
    rank: int,
    ranks: Sequence[int],
    hand_out: HandOut,
    turns: Iterator[None],
    absent: Callable[[Sequence[int], bool], str],
) -> None:
    """Has the bulletin enter the session of these ranks, all of which are there then.

    Args:
        turns: ends when it is time to give up; waits a little otherwise.
        absent: what is said of ranks that did not come, and whether a connection has ended.

    Raises:
        CompileError: some did not.
    """
    if len(ranks) == 1:
        bulletin.enter(secrets.token_bytes(_SECRET_BYTES))
        return
    values = torch.zeros(_SECRET_BYTES, dtype=torch.uint8)
    if rank == ranks[0]:
        # Not the program's random state, which others can guess.
        values = torch.tensor(list(secrets.token_bytes(_SECRET_BYTES)), dtype=torch.uint8)
    others = _Others(bulletin, [other for other in ranks if other != rank])
    values = values.to(hand_out.device)
    work = hand_out.begin(values)
    message = ""
    for _ in turns:
        if work.is_completed() or (message := others.look_now_and_then()):
            break
    try:
        if not work.is_completed():
            raise RuntimeError(message or "it takes too long")
        work.wait()
    except RuntimeError as error:  # of a connection, where a rank has ended
        raise CompileError(message or others.why(work.is_completed(), absent)) from error
    bulletin.enter(bytes(values.tolist()))


def wait_until_all_know(bulletin: Bulletin, ranks: Sequence[int], at_most_s: float) -> None:
    """Returns when each of the ranks has given its program the error that they did not meet, or has ended."""
    until_s = time.monotonic() + at_most_s
    with suppress(StoreLost):
        for rank in ranks:
            while time.monotonic() < until_s:
                report = bulletin.report_of(rank)
                if report is not None and (
                    report["failed"] or report["left"] or state_of(report["process"]) in _ENDED
                ):
                    break
                time.sleep(_LOOK_S / 5)
    # Who has said so is still to print it, and launchers end all when one ends.
    time.sleep(_LOOK_S / 5)


class _Others:
    """What they have reported openly, before there is a secret. So all look for themselves whether a process is there:
    who could make up that one has ended would still be believed, but could have spoilt the process group as well."""

    def __init__(self, bulletin: Bulletin, ranks: Sequence[int]) -> None:
        self._bulletin, self._ranks = bulletin, ranks
        self._watched = deque(map(Watched, ranks))
        self._looked_s = 0.0

    def look_now_and_then(self) -> str:
        if time.monotonic() < self._looked_s + _LOOK_S:
            return ""
        found = self._look()
        self._looked_s = time.monotonic()
        return found

    def _look(self) -> str:
        """At some of them, in turn: all ask the same store."""
        for _ in range(min(_LOOKS, len(self._watched))):
            watched = self._watched[0]
            self._watched.rotate(-1)
            report, message = watched.look(functools.partial(self._bulletin.report_of, watched.rank))
            if report is not None and report["left"] and not report["failed"]:
                message = (
                    f"rank {watched.rank} {describe(report)} {report['left']}, before it came to an agreement"
                )
            if message:
                return message
        return ""

    def why(self, is_broken: bool, absent: Callable[[Sequence[int], bool], str]) -> str:
        """A connection has ended, or the time: which rank is to blame."""
        until_s = time.monotonic() + (_EXPLAIN_S if is_broken else 0.0)
        while True:
            if message := self._look():
                return message
            if time.monotonic() > until_s:
                break
            time.sleep(_LOOK_S / 5)
        reports = [(rank, self._bulletin.report_of(rank)) for rank in self._ranks]
        for _, report in reports:
            if report is not None and report["failed"]:
                return str(report["failed"])
        missing = [rank for rank, report in reports if report is None or report["doing"] != ARRIVED]
        return absent(missing or self._ranks, is_broken)
