"""A failure on one rank ends the job on every rank, also on those that are blocked in an all-reduce meanwhile.

A rank that fails posts why. The others look for such a post about once a second when they wait: in the loops in which
they wait for one another or for a bucket on the CPU, and, for whatever else may block the main thread, in a thread of
the watch. The error is raised in the main thread where it next calls the compiled module, starts or waits for a
bucket, or ends a backward. If it does neither, it is blocked, or a GPU is: the thread then logs the error and aborts
the process group, which frees both.

The thread also sees that nobody waits for this rank in vain: another rank that compiles what this one does not has
said so before it began, and says so when it has done (``Agreement``). And it is the watchdog of what a GPU waits for
beside the process group's collectives, which have one (``Waiting``).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from compile_core.errors import CompileError
from distributed.agreement.bulletin import Bulletin

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
# The thread looks less often when nothing happens for long, unless collectives are waited for by a device: nobody else
# looks then.
_MOST_INTERVAL_S, _MOST_INTERVAL_ON_DEVICE_S = 30.0, 2.0
# How long the main thread has to come by before the process group is aborted.
_ABORT_AFTER_S = 2.0
# How long a rank that failed waits for the others to have heard of it, at most: launchers end them when it ends.
_LINGER_S = 3.0
_SPEAK_S = 0.2
_JOIN_S = 2.0
_FAILURE, _HEARD = "failure", "failure/heard"


class Waiting(Protocol):
    """Makes a device wait for other ranks, by none of the group's collectives. Its methods are called on any thread."""

    def late(self) -> str:
        """What has waited for longer than the group allows, as a message for all ranks; or ""."""
        ...

    def let_go(self) -> None:
        """Nothing is waited for any longer: the job has failed."""
        ...


class FailureWatch:
    """Tells the ranks of one process group of failures, and hears of them.

    Args:
        bulletin: of the group.
        size: how many ranks the group has.
        abort: ends the group's collectives.
        look_further: called at each look; raises ``CompileError`` where it finds ranks that wait in vain for others. Is
            told whether a connection to one of them has ended.
        is_over: whether the group was destroyed.
        on_device: collectives are waited for by a device, not by the host in ``wait``.

    Attributes:
        failure: what every rank is told, or "".
    """

    def __init__(
        self,
        bulletin: Bulletin,
        size: int,
        abort: Callable[[], None],
        look_further: Callable[[bool], None],
        is_over: Callable[[], bool],
        on_device: bool,
    ) -> None:
        self.failure = ""
        self._bulletin = bulletin
        self._others = size - 1
        self._abort = abort
        self._look_further = look_further
        self.is_over = is_over
        self.most_interval_s = _MOST_INTERVAL_ON_DEVICE_S if on_device else _MOST_INTERVAL_S
        self._lock = threading.RLock()
        self._is_ours = False
        self._was_raised = False
        self._last_words = ""
        self._waiting: list[weakref.ref[Waiting]] = []
        self._was_aborted = False
        self._last_point_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_look_now_and_then,
            args=(weakref.ref(self), self._stop),
            name="gradsplit-watch",
            daemon=True,
        )
        self._thread.start()
        _watches.add(self)

    def announce(self, message: str) -> None:
        """Ends the job on the other ranks; this one is about to raise an error of its own."""
        self._post(message)
        self._was_raised = True
        self.free()
        self._linger()

    def watch_over(self, waiting: Waiting) -> None:
        """For as long as somebody else keeps it."""
        self._waiting = [*(reference for reference in self._waiting if reference()), weakref.ref(waiting)]

    def announce_at_exit(self, message: str) -> None:
        """Ends the job on the other ranks if this process ends before its main thread comes by again."""
        self._last_words = message

    def at_point(self) -> None:
        """The main thread comes by.

        Raises:
            CompileError: the job has failed.
        """
        self._last_words = ""
        self._last_point_s = time.monotonic()
        if self.failure:
            self._was_raised = True
            self.free()
            self._linger()
            raise CompileError(self.failure)

    def look(self, connection_ended: bool = False) -> None:
        """Looks for failures now.

        Args:
            connection_ended: nobody waits any longer for a rank that has not ended what it announced.

        Raises:
            CompileError: there is one, or ranks wait for one another in vain.
        """
        self._last_point_s = time.monotonic()
        self._look(connection_ended)
        self.at_point()

    def wait(self, work: Any) -> None:
        """Waits for a collective on the CPU, with an eye on failures.

        Raises:
            CompileError: the job has failed.
        """
        while True:
            try:
                work.wait(timedelta(seconds=POLL_INTERVAL_S))
                return
            except RuntimeError:
                # A time limit that has passed looks like any other error. A rank that ends takes its connections with
                # it, so that an error may be the echo of a failure.
                has_ended = work.is_completed()
                self.look(has_ended)
                if has_ended:
                    raise

    def close(self) -> None:
        """The process ends. A daemon thread that is in C++ meanwhile would abort it, so the thread ends first."""
        if self._last_words:
            with suppress(RuntimeError, ConnectionRefusedError):  # the store has ended, and with it the job
                self._bulletin.require_server()
                self.announce(self._last_words)
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @property
    def waited_in_vain(self) -> bool:
        """What the main thread waited for came to nothing, and it has not heard of that."""
        return self._was_aborted and not self._was_raised

    def look_in_background(self, interval_s: float) -> bool:
        """For the thread: looks if the main thread has not come by for so long; whether it looked."""
        if self.failure:
            self.free()
            return False
        if time.monotonic() - self._last_point_s < interval_s:
            return False
        self._bulletin.require_server()
        self._look()
        if self.failure and not self._stop.wait(_ABORT_AFTER_S) and not self._was_raised:
            logger.error("the job has failed while this rank waits for others: %s", self.failure)
            self._was_aborted = True
            self.free()
            self._abort()
        return True

    def _look(self, connection_ended: bool = False) -> None:
        with self._lock:
            if self.failure or not self._bulletin.has_session:
                return
            posted = self._bulletin.read_if_there(_FAILURE)
            if posted is not None:
                self.failure = posted
                self._bulletin.count(_HEARD, 1)
                return
            try:
                self._look_further(connection_ended)
            except CompileError as error:
                self._post(str(error))
            for waiting in self._all_waiting():
                with suppress(RuntimeError):  # as in ``free``
                    if message := waiting.late():
                        self._post(message)

    def _post(self, message: str) -> None:
        with self._lock:
            # Before a session nobody waits for this rank but for that.
            if self.failure or not self._bulletin.has_session:
                return
            try:
                self.failure = self._bulletin.post_first(_FAILURE, message)
                self._is_ours = self.failure == message
                if not self._is_ours:
                    self._bulletin.count(_HEARD, 1)
            except RuntimeError:  # the store is gone, and with it those who would hear
                self.failure = message

    def free(self) -> None:
        """The job has failed: nothing waits for other ranks beside the group. A rank that comes late may undo it."""
        for waiting in self._all_waiting():
            with suppress(RuntimeError):  # a device that is beyond it
                waiting.let_go()

    def _all_waiting(self) -> list[Waiting]:
        return [waiting for waiting in (reference() for reference in self._waiting) if waiting is not None]

    def _linger(self) -> None:
        """Gives the others time to hear of a failure, and to speak of it."""
        if not self._is_ours:
            return
        self._is_ours = False
        deadline = time.monotonic() + _LINGER_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self._bulletin.count(_HEARD) < self._others:
                time.sleep(0.05)
        time.sleep(_SPEAK_S)


# Those of this process. The thread holds a weak reference, too, and ends with its watch.
_watches: weakref.WeakSet[FailureWatch] = weakref.WeakSet()


def _look_now_and_then(reference: weakref.ref[FailureWatch], stop: threading.Event) -> None:
    interval_s = POLL_INTERVAL_S
    while not stop.wait(POLL_INTERVAL_S):
        watch = reference()
        if watch is None or watch.is_over():
            return
        try:
            looked = watch.look_in_background(interval_s)
        except (RuntimeError, ConnectionRefusedError):  # the store has ended, and with it the job
            return
        interval_s = min(2 * interval_s, watch.most_interval_s) if looked else POLL_INTERVAL_S
        del watch


@atexit.register
def _close_all() -> None:
    watches = list(_watches)
    for watch in watches:
        watch.close()
    if any(watch.waited_in_vain for watch in watches):
        # Such a program must not end as if all was well.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)
