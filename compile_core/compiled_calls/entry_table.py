"""The guard table of a compiled function: its entries, most recently used first, and why they did not fit.

Calls read the table without a lock: it is a tuple that changes replace as a whole, under a lock that is held for the
replacement only, so that a call which fits never waits for another thread's capture.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.guard_checks.check import explain_failure, values_read
from gradsplit.compile_core.ir.captured import CapturedFrame, Guard
from gradsplit.compile_core.torch_facts.wrapper_tensors import inner_tensors, memory_of

RunGraph = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class GuardFailure:
    """A guard that does not hold; ``found`` says what the values are that it is about."""

    guard: Guard
    found: str


@dataclass(frozen=True)
class Entry:
    """A row of the guard table.

    ``check`` takes the frame's arguments; it returns the list of the graph's inputs if all guards hold, else an int.
    """

    captured: CapturedFrame
    compiled: RunGraph | None
    check: Callable[..., Any]
    run: Callable[..., Any]

    def explain(self, arguments: Sequence[Any]) -> str:
        """The guard that does not hold for these arguments, in words."""
        guard = self.failing_guard(arguments)
        return explain_failure(self.captured, arguments) if guard is None else f"not: {guard.text}"

    def failing_guard(self, arguments: Sequence[Any]) -> Guard | None:
        """The guard that does not hold; None where not even what it is about can be read."""
        failed = self.check(*arguments)
        return self.captured.guards[failed] if type(failed) is int and failed >= 0 else None

    def at_failure(self, arguments: Sequence[Any]) -> GuardFailure | None:
        """The guard that does not hold, with the values of what it is about."""
        guard = self.failing_guard(arguments)
        return None if guard is None else GuardFailure(guard, values_read(self.captured, guard, arguments))

    def reads_shared_memory(self, arguments: Sequence[Any]) -> bool:
        """Whether inputs of the graph share memory; these arguments fit."""
        owners = [
            memory_of(inner)
            for tensor in self.check(*arguments)
            if isinstance(tensor, torch.Tensor)
            for inner in inner_tensors(tensor)
            if inner.numel()
        ]
        return len(set(owners)) < len(owners)


class EntryTable:
    """See the file's docstring."""

    def __init__(self) -> None:
        self.entries: tuple[Entry, ...] = ()
        self._misses: collections.Counter[str] = collections.Counter()
        self._last_reason: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, entry: Entry) -> None:
        """A new entry, in front; another thread may have been faster."""
        with self._lock:
            if not any(other is entry for other in self.entries):
                self.entries = (entry, *self.entries)

    def move_to_front(self, entry: Entry) -> None:
        """The entry was used just now."""
        with self._lock:
            if entry in self.entries:  # not if another thread has cleared the table meanwhile
                self.entries = (entry, *(other for other in self.entries if other is not entry))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.entries = ()
            self._misses.clear()
            self._last_reason.clear()

    def find(self, arguments: Sequence[Any]) -> Entry | None:
        """The first entry whose guards hold."""
        return next((entry for entry in self.entries if type(entry.check(*arguments)) is list), None)

    def note_miss(self, arguments: Sequence[Any]) -> str | None:
        """Why the entry used last does not fit these arguments, None for an empty table; counts the guards.

        Guards about the same thing (``n == 1`` and ``n == 2``) count as one.
        """
        if not self.entries:
            return None
        last = self.entries[0]
        guard = last.failing_guard(arguments)
        reason = last.explain(arguments)
        subject = reason if guard is None else f"{guard.kind} {', '.join(map(str, guard.sources))}"
        self._misses[subject] += 1
        self._last_reason[subject] = reason
        return reason

    def most_frequent_reason(self) -> tuple[str, int]:
        """Why ``note_miss`` found entries not to fit, most often, and how often; in its latest words."""
        ((subject, count),) = self._misses.most_common(1)
        return self._last_reason[subject], count
