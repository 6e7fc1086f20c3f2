"""Ranks look after one another in a ring: each after the one before it that has not left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.rank_process import State, state_of
from gradsplit.distributed.agreement.voice import LEFT

logger = logging.getLogger(__name__)

# A rank that has not been heard of for so long has failed: all are to know within half a minute, but a busy machine may
# keep a process waiting for seconds.
ALARM_S = 18.0
# Between two looks no more can have passed for who was not stopped itself.
_LONGEST_LOOK_S = 2.0
# When who waits for a rank that lives speaks of it, and how long until it does so again.
WARN_AFTER_S, _WARN_AGAIN_S = 20.0, 60.0
# How long two ranks have waited for each other before that is an error. What they say is a second old.
_ELSEWHERE_AFTER_S = 10.0
SAME_ORDER = "all ranks must call the same modules and run as many backwards, in the same order"


class Watched:
    """A rank that another one looks at now and then.

    Args:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._beat, self._process, self._silent_s = -1, None, 0.0
        self._has_warned = False
        self._looked_s = time.monotonic()

    def look(self, read: Callable[[], Any]) -> tuple[Any, str]:
        """What it has said last, and what has become of it, as a message for all ranks; or "".

        Args:
            read: what it has said; ``None`` if it has said nothing.
        """
        # As it was before the last word is read, which is spoken before the end.
        state = State.UNKNOWN if self._process is None else state_of(self._process)
        said = read()
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if said is None or said.get("left") or said.get("failed"):
            return said, ""
        if said["beat"] != self._beat:
            self._beat, self._process, self._silent_s = said["beat"], said["process"], 0.0
            return said, ""
        self._silent_s += passed_s
        name = f"rank {self.rank} {describe(said)}"
        if state is State.GONE:
            return said, f"{name} {state.value}. {_ADVICE}"
        if self._silent_s <= ALARM_S:
            return said, ""
        if state is not State.RUNS:
            return said, f"{name} has said nothing for {ALARM_S:g} s: it {state.value}. {_ADVICE}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s has said nothing for %g s, but its process runs", name, ALARM_S)
        return said, ""


class Neighbour:
    """The rank that this one looks after.

    Args:
        rank: this one.
        ranks: those of the group.
        operations: of this one.
    """

    def __init__(self, rank: int, ranks: Sequence[int], operations: Operations) -> None:
        position = list(ranks).index(rank)
        # Those before this one, the nearest first.
        self._before = [
            Watched(other) for other in (*reversed(ranks[:position]), *reversed(ranks[position + 1 :]))
        ]
        self._rank, self._operations = rank, operations
        # Of those that have left, what they have said last.
        self._left: dict[int, Any] = {}
        # What both ranks did when they were last looked at, since when, and the next time to speak of it.
        self._state: tuple[Any, ...] = ()
        self._same_since_s, self._warn_after_s = 0.0, WARN_AFTER_S

    def look(self, bulletin: Bulletin) -> str:
        """What has become of it, or is in vain since it waits for something else, as a message for all ranks; or ""."""
        if message := next(filter(None, map(self._message_of_left, self._left)), ""):
            return message
        if not self._before:
            return ""
        watched = self._before[0]
        said, message = watched.look(lambda: bulletin.said_by(watched.rank))
        if said is None or message:
            return message
        if said.get("left"):
            self._before.pop(0)
            if "operation" in said:
                self._left[watched.rank] = said
            return ""
        return self._in_vain(watched.rank, said) if "operation" in said else ""

    def _message_of_left(self, rank: int) -> str:
        said = self._left[rank]
        what, _ = self._operations.waits_in(said["operation"])
        return what and f"rank {rank} {describe(said)} {LEFT}, while rank {self._rank} {what}"

    def _in_vain(self, rank: int, said: Mapping[str, Any]) -> str:
        theirs, ours = said["operation"], self._operations
        name = f"rank {rank} {describe(said)}"
        if what := ours.contradicts(theirs):
            return f"{name} {theirs['report']} when rank {self._rank} {what}; {SAME_ORDER}"
        (what, is_elsewhere), state, now_s = ours.waits_in(theirs), (theirs, ours.said()), time.monotonic()
        if state != self._state:
            self._state, self._same_since_s, self._warn_after_s = state, now_s, WARN_AFTER_S
        passed_s = now_s - self._same_since_s
        if is_elsewhere and passed_s > _ELSEWHERE_AFTER_S:
            return f"{name} waits in {theirs['is_in']}, while rank {self._rank} {what}; {SAME_ORDER}"
        if what and passed_s > self._warn_after_s:
            self._warn_after_s += _WARN_AGAIN_S
            logger.warning("rank %d has waited for %s for %.0f s: it %s", self._rank, name, passed_s, what)
        return ""


_ADVICE = "Look at what that rank has printed, and whether its machine ran out of memory"


def describe(said: Mapping[str, Any]) -> str:
    """Where a rank is, and what it did when it was last heard of."""
    doing = ", ".join(filter(None, [said["doing"], said["place"] and f"at {said['place']}"]))
    return f"(process {said['process'][1]} on {said['host']}{'; last heard of: ' if doing else ''}{doing})"
