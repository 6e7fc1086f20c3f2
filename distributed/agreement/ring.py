"""Ranks look after one another in a ring: each after the one before it that has not left."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.rank_process import State, state_of

logger = logging.getLogger(__name__)

# A rank that has not been heard of for so long has failed: all are to know within half a minute, but a busy machine may
# keep a process waiting for seconds.
ALARM_S = 18.0
# Between two looks no more can have passed for who was not stopped itself.
_LONGEST_LOOK_S = 2.0


class Neighbour:
    """The rank that this one looks after.

    Args:
        rank: this one.
        ranks: those of the group.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        position = list(ranks).index(rank)
        # Those before this one, the nearest first.
        self._before = [*reversed(ranks[:position]), *reversed(ranks[position + 1 :])]
        self._look_at_next()

    def look(self, bulletin: Bulletin) -> str:
        """What has become of it, as a message for all ranks; or ""."""
        if not self._before:
            return ""
        rank = self._before[0]
        # As it was before the last word is read, which is spoken before the end.
        state = State.UNKNOWN if self._process is None else state_of(self._process)
        said = bulletin.read_if_there(f"alive/{rank}")
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if said is None:  # it has not come yet
            return ""
        if said.get("left"):
            self._before.pop(0)
            self._look_at_next()
            return ""
        if said["beat"] != self._beat:
            self._beat, self._process, self._silent_s = said["beat"], said["process"], 0.0
            return ""
        self._silent_s += passed_s
        if state is State.GONE:
            return f"rank {rank} {describe(said)} {state.value}. {_ADVICE}"
        if self._silent_s <= ALARM_S:
            return ""
        if state is not State.RUNS:
            return f"rank {rank} {describe(said)} has said nothing for {ALARM_S:g} s: it {state.value}. {_ADVICE}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d %s has said nothing for %g s, but its process runs", rank, describe(said), ALARM_S
            )
        return ""

    def _look_at_next(self) -> None:
        self._beat, self._process, self._silent_s = -1, None, 0.0
        self._has_warned = False
        self._looked_s = time.monotonic()


_ADVICE = "Look at what that rank has printed, and whether its machine ran out of memory"


def describe(said: Mapping[str, Any]) -> str:
    """Where a rank is, and what it did when it was last heard of."""
    doing = ", ".join(filter(None, [said["doing"], said["place"] and f"at {said['place']}"]))
    return f"(process {said['process'][1]} on {said['host']}{'; last heard of: ' if doing else ''}{doing})"
