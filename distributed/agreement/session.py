"""Ranks meet before their first round: the first hands out a secret, by which entries in the store are known as theirs.

It goes by a collective of the process group, between the ranks' own connections: the store is open to everybody who can
reach it, and may have entries of process groups before. In the store ranks only note that they have arrived, so that
those who have not can be named.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.agreement.bulletin import Bulletin

_SECRET_BYTES = 32


@dataclass(frozen=True)
class HandOut:
    """A collective that hands on what the first rank of a group has.

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
    absent: Callable[[Sequence[int]], str],
) -> None:
    """Has the bulletin enter the session of these ranks.

    Args:
        turns: ends when it is time to give up; waits a little otherwise.
        absent: what is said of ranks that did not come.

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
    bulletin.note_arrival(rank)
    values = values.to(hand_out.device)
    work = hand_out.begin(values)
    for _ in turns:
        if work.is_completed():
            break
    try:
        if not work.is_completed():
            raise RuntimeError("it takes too long")
        work.wait()
    except RuntimeError as error:  # of a connection, where a rank has ended
        missing = [other for other in ranks if other != rank and not bulletin.has_arrived(other)]
        raise CompileError(absent(missing or (ranks[1:] if rank == ranks[0] else ranks[:1]))) from error
    bulletin.enter(bytes(values.tolist()))
