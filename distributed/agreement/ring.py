"""Ranks look after one another in a ring: each after the one before it that has not left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.heartbeat import LEFT
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.rank_process import State, state_of

logger = logging.getLogger(__name__)

# A rank without a heartbeat for so long has failed: all are to know within half a minute, but a busy machine may
# keep a process waiting for seconds.
ALARM_S = 18.0
# Between two looks no more can have passed for who was not stopped itself.
_LONGEST_LOOK_S = 2.0
# When a rank that waits for one that lives logs that, and how long until it does so again.
WARN_AFTER_S, _WARN_AGAIN_S = 20.0, 60.0
# How long two ranks have waited for each other before that is an error. Their reports are a second old.
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
        """Its last report, and why it has failed, as a message for all ranks; or "".

        Args:
            read: returns its last report; ``None`` if there is none.
        """
        # Of its process before the report is read: a process that ends sends its last report first.
        state = State.UNKNOWN if self._process is None else state_of(self._process)
        report = read()
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if report is None or report.get("left") or report.get("failed"):
            return report, ""
        if report["beat"] != self._beat:
            self._beat, self._process, self._silent_s = report["beat"], report["process"], 0.0
            return report, ""
        self._silent_s += passed_s
        name = f"rank {self.rank} {describe(report)}"
        if state is State.GONE:
            return report, f"{name} {state.value}. {_ADVICE}"
        if self._silent_s <= ALARM_S:
            return report, ""
        if state is not State.RUNS:
            return report, f"{name} has said nothing for {ALARM_S:g} s: it {state.value}. {_ADVICE}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s has said nothing for %g s, but its process runs", name, ALARM_S)
        return report, ""


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
        # Of those that have left, their last report.
        self._left: dict[int, Any] = {}
        # What both ranks did at the last look, since when, and when to log it next.
        self._state: tuple[Any, ...] = ()
        self._same_since_s, self._warn_after_s = 0.0, WARN_AFTER_S

    def look(self, bulletin: Bulletin) -> str:
        """Why it has failed, or which wait will never end since ranks wait for each other, as a message for all ranks;
        or ""."""
        if message := next(filter(None, map(self._message_of_left, self._left)), ""):
            return message
        if not self._before:
            return ""
        watched = self._before[0]
        report, message = watched.look(lambda: bulletin.report_of(watched.rank))
        if report is None or message:
            return message
        if report.get("left"):
            self._before.pop(0)
            if "operation" in report:
                self._left[watched.rank] = report
            return ""
        return self._in_vain(watched.rank, report) if "operation" in report else ""

    def _message_of_left(self, rank: int) -> str:
        report = self._left[rank]
        what, _ = self._operations.waits_in(report["operation"])
        return what and f"rank {rank} {describe(report)} {LEFT}, while rank {self._rank} {what}"

    def _in_vain(self, rank: int, report: Mapping[str, Any]) -> str:
        theirs, ours = report["operation"], self._operations
        name = f"rank {rank} {describe(report)}"
        if what := ours.contradicts(theirs):
            return f"{name} {theirs['report']} when rank {self._rank} {what}; {SAME_ORDER}"
        (what, is_elsewhere), now_s = ours.waits_in(theirs), time.monotonic()
        state = theirs, ours.as_report()
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


def describe(report: Mapping[str, Any]) -> str:
    """Where a rank is, and what it did by its last report."""
    doing = ", ".join(filter(None, [report["doing"], report["place"] and f"at {report['place']}"]))
    return (
        f"(process {report['process'][1]} on {report['host']}{'; last heard of: ' if doing else ''}{doing})"
    )
