"""Ranks meet before their first round, so that none takes what another process group has left in the store for news.

A store may outlive process groups: a program under torchrun that destroys its group and makes another, to go on after a
failure say, finds all entries of the first. So entries are those of a session, whose name the first rank chooses.
Whoever reads a name may read an old one. It answers with a name of its own, which nobody could know before, and goes by
the session in which the first rank repeats that.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence

from compile_core.errors import CompileError
from distributed.agreement.bulletin import Bulletin


def meet(
    bulletin: Bulletin,
    rank: int,
    ranks: Sequence[int],
    turns: Iterator[None],
    absent: Callable[[Sequence[int]], str],
) -> None:
    """Has the bulletin enter the session of these ranks.

    Args:
        turns: ends when it is time to give up; waits a little otherwise.
        absent: what is said of ranks that did not come.

    Raises:
        CompileError: some did not.
    """
    mine = uuid.uuid4().hex
    if rank == ranks[0]:
        _invite(bulletin, mine, ranks[1:], turns, absent)
    else:
        _answer(bulletin, mine, rank, turns, lambda: absent(ranks[:1]))


def _invite(
    bulletin: Bulletin,
    session: str,
    others: Sequence[int],
    turns: Iterator[None],
    absent: Callable[[Sequence[int]], str],
) -> None:
    bulletin.post("session", session)
    for _ in turns:
        missing = [rank for rank in others if not bulletin.has(f"{session}/answer/{rank}")]
        if not missing:
            break
    answers = {str(rank): bulletin.read(f"{session}/answer/{rank}") for rank in others if rank not in missing}
    failure = absent(missing) if missing else ""
    bulletin.post(f"{session}/met", {"answers": answers, "failure": failure})
    _conclude(bulletin, session, failure)


def _answer(
    bulletin: Bulletin, mine: str, rank: int, turns: Iterator[None], absent: Callable[[], str]
) -> None:
    session = ""
    for _ in turns:
        invited = bulletin.read_if_there("session")
        if invited is None:
            continue
        if invited != session:
            session = invited
            bulletin.post(f"{session}/answer/{rank}", mine)
        met = bulletin.read_if_there(f"{session}/met")
        if met is not None and met["answers"].get(str(rank)) == mine:
            _conclude(bulletin, session, met["failure"])
            return
    raise CompileError(absent())


def _conclude(bulletin: Bulletin, session: str, failure: str) -> None:
    if failure:
        raise CompileError(failure)
    bulletin.enter(session)
