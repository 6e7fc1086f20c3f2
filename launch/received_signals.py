"""Signals to a supervisor: noted when they come, and heeded by its loop, which knows what it is in the middle of."""

import os
import signal
from collections import deque
from collections.abc import Callable
from types import FrameType

PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Handed on as they are, unless the user has them end the job; schedulers announce the end of an allocation so."""


class ReceivedSignals:
    """Takes over this process's signal handlers. ``ending``: the signals that end the job; ``note_end`` is called as
    soon as one of them comes."""

    def __init__(self, ending: frozenset[int], note_end: Callable[[], None]) -> None:
        self.ending = ending
        self._note_end = note_end
        self.started = False
        """Whether there are processes to end; until then an ending signal ends this process at once."""
        self._received: deque[signal.Signals] = deque()
        for number in ending | PASSED_ON:
            signal.signal(number, self._note)

    def take(self) -> signal.Signals | None:
        """Return the oldest signal not yet taken; None without one."""
        return self._received.popleft() if self._received else None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in self.ending:
            self._note_end()
            if not self.started:
                os._exit(128 + number)
        self._received.append(signal.Signals(number))
