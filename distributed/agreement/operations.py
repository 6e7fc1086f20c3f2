"""What the ranks of a group do together, by number: all do the same in one order, or some would wait without end.

A rank may leave a backward out, or its loop early. The others then wait in a bucket in which it takes no part. That is
certain where it does something else by the same number, or has left, or sits in a collective of the program's own that
the others have not begun. As long as it may still come it is waited for, and named.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# More than a backward has buckets: no rank is further ahead of another.
_REMEMBERED = 1024
_Operation = tuple[int, str, str, bool, int]
_COLLECTIVES = ("barrier", "broadcast", "gather", "reduce", "scatter", "to_all")


class Operations:
    """Those that this rank has begun, compared with those of another rank.

    Args:
        collectives: how many the group has begun on this rank, ours and the program's.
        is_groups: whether an argument ``group`` of torch's functions is that group.

    Attributes:
        term: numbers begin anew with it.
    """

    def __init__(self, collectives: Callable[[], int], is_groups: Callable[[Any], bool]) -> None:
        self.term = 0
        self._collectives, self._is_groups = collectives, is_groups
        self._number = 0
        # By number; with how many collectives the group had begun before.
        self._begun: deque[_Operation] = deque(maxlen=_REMEMBERED)

    def begin(self, what: str, is_answered: bool = True, report: str = "") -> None:
        """The next one.

        Args:
            what: the same on all ranks.
            is_answered: it does not end before all ranks have begun it.
            report: what is said of this rank, if more than that.
        """
        self._number = number = self._number + 1
        self._begun.append((number, what, report or what, is_answered, self._collectives()))

    def begin_anew(self, term: int) -> None:
        self.term, self._number = term, 0
        self._begun.clear()

    def as_report(self) -> dict[str, Any]:
        """What this rank reports to the others."""
        begun = self._begun.copy()
        number, what, report, _, _ = begun[-1] if begun else (0, "", "", True, 0)
        return {
            "term": self.term,
            "number": number,
            "what": what,
            "report": report,
            "collectives": self._collectives(),
            "is_in": self._place(_COLLECTIVES),
        }

    def contradicts(self, theirs: dict[str, Any]) -> str:
        """What this rank does where one with this report does another thing instead; or ""."""
        for number, what, report, _, _ in self._begun_in(theirs["term"]):
            if number == theirs["number"] and what != theirs["what"]:
                return report
        return ""

    def waits_in(self, theirs: dict[str, Any]) -> tuple[str, bool]:
        """What this rank has begun, and does not end before the other begins it, or ""; and whether that waits in a
        collective of the program's that this rank had not begun before. What is sent between two ranks counts as well,
        so the numbers tell nothing where the other is not seen in one."""
        for number, _, report, is_answered, collectives in self._begun_in(theirs["term"]):
            if number > theirs["number"] and is_answered:
                return report, bool(theirs["is_in"]) and theirs["collectives"] > collectives
        return "", False

    @property
    def is_leaving(self) -> bool:
        """The main thread destroys the group, which may wait for collectives of the others in which it has no part."""
        return self._place(("destroy_process_group",)) != ""

    def _begun_in(self, term: int) -> Iterable[_Operation]:
        return self._begun.copy() if term == self.term else ()

    def _place(self, functions: Sequence[str]) -> str:
        """The function of torch's over this group in which the main thread is, if its name has one of these; or ""."""
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == distributed_c10d.__file__ and any(
                map(code.co_name.__contains__, functions)
            ):
                group = frame.f_locals.get("group")
                return code.co_name if self._is_groups(group or dist.group.WORLD) else ""
            frame = frame.f_back
        return ""
