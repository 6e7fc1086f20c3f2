"""A failure on one rank ends the job on every rank, also on those that are blocked in an all-reduce meanwhile.

A rank that fails posts why. A rank that cannot, because it is killed or stopped, is missed: a thread of each rank sends
a heartbeat about once a second, also while the rank compiles, and watches the rank before it, in a ring, so that a
rank's requests to the store do not grow with their number. On one machine the system knows whether a process has ended
or is only slow.

The thread also looks whether a failure was posted. The error is raised in the main thread where it next calls the
compiled module, starts or waits for a bucket, or ends a backward. If it does neither, it is blocked, or a GPU is: the
thread then logs the error and aborts the process group, which frees both.

A connection that ends, and an error that comes of it, is the consequence of a failure, which the thread reads next. So
is the end of the store, if rank 0 holds it, which is no failure where a program is about to end anyway.

The thread also sees that nobody waits for this rank in vain (``Agreement``). And it is the watchdog of what a GPU waits
for beside the process group's collectives, which have one (``Waiting``).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.distributed as dist

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.agreement.bulletin import Bulletin, StoreLost, is_held_by_launcher
from gradsplit.distributed.agreement.heartbeat import LEFT, Heartbeat
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.ring import ALARM_S, Neighbour, describe

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
# How long the consequence of a failure waits for the failure itself to be known.
_EXPLAIN_S = ALARM_S + 5.0
# Ranks that leave do not say who needs them: a failure that is about to be posted explains more.
_LEFT_AFTER_S = 3.0
# How long the main thread has to check for failures before the process group is aborted.
_ABORT_AFTER_S = 2.0
# How long a rank that failed waits for the others to have read of it, at most: launchers end them when it ends.
LINGER_S = 3.0
_SPEAK_S = 0.2
_JOIN_S = 2.0


class Waiting(Protocol):
    """Makes a device wait for other ranks, by none of the group's collectives. Its methods are called on any thread."""

    def late(self) -> str:
        """What has waited for longer than the group allows, as a message for all ranks; or ""."""
        ...

    def release_waits(self) -> None:
        """Nothing is waited for any longer: the job has failed."""
        ...


class FailureWatch:
    """Posts failures to the ranks of one process group, and reads of them.

    Args:
        bulletin: of the group.
        rank: this process, by its number in the job.
        ranks: those of the group.
        abort: ends the group's collectives.
        look_further: called at each look; raises ``CompileError`` where it finds ranks that wait in vain for others.
        is_over: whether the group was destroyed.
        on_device: collectives are waited for by a device, not by the host in ``wait``.
        operations: what the ranks do together.

    Attributes:
        failure: the message that every rank raises, or "".
        was_raised: the program knows of it.
        was_aborted: the group's collectives were ended because of it.
        operations: as given; their ``term`` is how many failures the ranks have recovered from, see ``begin_anew``.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        rank: int,
        ranks: Sequence[int],
        abort: Callable[[], None],
        look_further: Callable[[], None],
        is_over: Callable[[], bool],
        on_device: bool,
        operations: Operations,
    ) -> None:
        self.failure, self.was_raised, self.was_aborted = "", False, False
        self.operations = operations
        self._bulletin = bulletin
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._abort = abort
        self._look_further = look_further
        self.is_over = is_over
        self._on_device = on_device
        self._lock = threading.RLock()
        # Of the failure that is known.
        self._must_linger = False
        self._holds_store = rank == 0 and not is_held_by_launcher()
        self._known_s = 0.0
        self._last_words = ""
        self._waiting: list[weakref.ref[Waiting]] = []
        # Nothing can be heard of the others; and where rank 0 has ended with the store, since when that may matter.
        self._is_cut_off = False
        self._lost: tuple[str, float] | None = None
        self._needs_store = 0 in ranks
        self.heartbeat = Heartbeat(bulletin, rank, operations)
        self._neighbour = Neighbour(rank, ranks, operations)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_poll_regularly,
            args=(weakref.ref(self), self.heartbeat, self._stop),
            name="gradsplit-watch",
            daemon=True,
        )
        if self._others:
            self._thread.start()
        _watches.add(self)
        if parent_process() is not None:  # such processes may end without what is registered with ``atexit``
            Finalize(None, _close_all, exitpriority=0)

    def begins(self, what: str, is_answered: bool = True) -> None:
        """See ``Operations.begin``."""
        self.operations.begin(what, is_answered)

    def announce(self, message: str) -> None:
        """Ends the job on the other ranks; this one is about to raise an error of its own."""
        self._post(message)
        self.was_raised = True
        self.free()
        self._linger()

    def begin_anew(self, term: int) -> None:
        """All ranks have raised the failure, and nothing of it is left."""
        with self._lock:
            self.failure, self.was_raised = "", False
            self.operations.begin_anew(term)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While this rank does what others may have to wait for, which it reports before it begins."""
        heartbeat = self.heartbeat
        before, heartbeat.doing = heartbeat.doing, what
        with suppress(StoreLost):  # the thread finds it out, too
            heartbeat.send()
        try:
            yield
        finally:
            heartbeat.doing = before
            with suppress(StoreLost):
                heartbeat.send()

    def watch_over(self, waiting: Waiting) -> None:
        """For as long as somebody else keeps it."""
        self._waiting = [*(reference for reference in self._waiting if reference()), weakref.ref(waiting)]

    def announce_at_exit(self, message: str) -> None:
        """Ends the job on the other ranks if this process ends before the next ``check_failures``."""
        self._last_words = message

    def check_failures(self, needs_others: bool = True) -> None:
        """Called by the main thread, often.

        Args:
            needs_others: it is going to wait for other ranks.

        Raises:
            CompileError: the job has failed.
        """
        self._last_words = ""
        if not needs_others:
            return
        if self.failure:
            self.was_raised = True
            self.free()
            self._linger()
            raise CompileError(self.failure)
        if self._lost is not None and time.monotonic() > self._lost[1]:
            raise CompileError(self._lost[0])

    def wait(self, work: Any) -> None:
        """Waits for a collective on the CPU, with an eye on failures.

        Raises:
            CompileError: the job has failed.
        """
        while True:
            try:
                work.wait(timedelta(seconds=POLL_INTERVAL_S))
                return
            except RuntimeError as error:
                # A time limit that has passed looks like any other error.
                if work.is_completed():
                    self.explain()
                    raise error
                self.check_failures()

    def explain(self) -> None:
        """An error has come of a connection that ended: a rank that ends takes its connections with it.

        Raises:
            CompileError: why that was.
        """
        waited_s = 0.0
        while self._bulletin.has_session and waited_s < _EXPLAIN_S:
            self.check_failures()
            if self._lost is not None:
                raise CompileError(self._lost[0])
            if waited_s > _LEFT_AFTER_S and (left := self._who_left()):
                raise CompileError(left)
            time.sleep(_SPEAK_S)
            waited_s += _SPEAK_S

    def close(self) -> None:
        """The process ends. A daemon thread that is in C++ meanwhile would abort it, so the thread ends first."""
        if self._stop.is_set():
            return
        with suppress(StoreLost):
            self._report_end()
        self._stop.set()
        if self._others and not self._is_cut_off:
            send_left(self.heartbeat)
        if self._others and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _report_end(self) -> None:
        error: BaseException | None = getattr(sys, "last_value", None)
        words = self._last_words
        if error is not None and not hasattr(sys, "ps1"):
            words = f"rank {self._rank} was ended by {describe_error(error)}{_place_of(error)}"
            if _is_consequence(error) and not self.failure:
                try:
                    self.explain()
                except CompileError as explained:
                    logger.error("%s", explained)
                    words = ""
        if words and not self._bulletin.has_session:  # who waits for this rank will look
            self.heartbeat.left = words.removeprefix(f"rank {self._rank} ")
        elif words and not self.failure:
            self.announce(words)

    @property
    def waited_in_vain(self) -> bool:
        """The wait of the main thread was aborted, and it does not know. A wait on the CPU raises."""
        return self.was_aborted and not self.was_raised and self._on_device

    def poll(self) -> bool:
        """Called by the thread, again and again as long as it returns true."""
        if self.failure:
            self.free()
            is_late = time.monotonic() > self._known_s + _ABORT_AFTER_S
            if is_late and not self.was_raised and not self.was_aborted:
                logger.error("the job has failed while this rank waits for others: %s", self.failure)
                self.was_aborted = True
                self._abort()
        elif self._lost is not None:
            # No failure where the program is about to end, but what the main thread may wait for will not come.
            if time.monotonic() > self._lost[1]:
                self.free()
                self._abort()
                return False
        else:
            try:
                self.heartbeat.send()
                if self._bulletin.has_session:
                    self._listen()
            except StoreLost as lost:
                # Before a session nobody waits for others but who meets them, and that one will see.
                return self._lose_store(lost) if self._bulletin.has_session else not lost.has_ended
        return True

    def _listen(self) -> None:
        with self._lock:
            posted = None if self.failure else self._bulletin.read_if_there(f"failure/{self.operations.term}")
            if posted is not None:
                self._hear(posted)
        if self.failure:
            return
        try:
            self._look_further()
        except StoreLost:
            raise
        except CompileError as error:
            self._post(str(error))
        for waiting in self._all_waiting():
            with suppress(RuntimeError):  # as in ``free``
                if message := waiting.late():
                    self._post(message)
        if message := self._neighbour.look(self._bulletin):
            self._post(message)

    def _hear(self, failure: str) -> None:
        self.failure, self._known_s = failure, time.monotonic()
        self._must_linger = self._holds_store
        self._bulletin.post_soon(f"failure/{self.operations.term}/heard/{self._rank}", True)

    def _post(self, message: str) -> None:
        with self._lock:
            # Before a session nobody waits for this rank but for that.
            if self.failure or not self._bulletin.has_session:
                return
            try:
                self._hear(self._bulletin.post_first(f"failure/{self.operations.term}", message))
                self._must_linger |= self.failure == message
            except StoreLost:  # and with it those who would hear
                self.failure, self._known_s = message, time.monotonic()

    def _who_left(self) -> str:
        with suppress(StoreLost):
            for rank in self._others:
                report = self._bulletin.report_of(rank)
                if report is not None and report.get("left"):
                    return f"rank {rank} {describe(report)} {LEFT}, while rank {self._rank} waits for it"
        return ""

    def _lose_store(self, lost: StoreLost) -> bool:
        self._is_cut_off = True
        if not lost.has_ended:
            # For the rank that holds it, if that was stopped and goes on.
            self._bulletin.post_soon(f"failure/{self.operations.term}", str(lost))
            self.failure, self._known_s = str(lost), time.monotonic()
        elif self._needs_store:
            self._lost = str(lost), time.monotonic() + _LEFT_AFTER_S
        return bool(self.failure or self._lost)

    def free(self) -> None:
        """The job has failed: nothing waits for other ranks beside the group. A rank that comes late may undo it."""
        for waiting in self._all_waiting():
            with suppress(RuntimeError):  # a device that is beyond it
                waiting.release_waits()

    def _all_waiting(self) -> list[Waiting]:
        return [waiting for waiting in (reference() for reference in self._waiting) if waiting is not None]

    def _linger(self) -> None:
        """Gives the others time to read a failure and to print it: this rank's own, and any if the store ends with this
        process."""
        if not self._must_linger:
            return
        self._must_linger = False
        deadline = time.monotonic() + LINGER_S
        heard = [f"failure/{self.operations.term}/heard/{other}" for other in self._others]
        with suppress(StoreLost):
            while time.monotonic() < deadline and not self._bulletin.has_all(heard):
                time.sleep(0.05)
        time.sleep(_SPEAK_S)


# Those of this process. The thread holds a weak reference, too, and ends with its watch.
_watches: weakref.WeakSet[FailureWatch] = weakref.WeakSet()


def _poll_regularly(
    reference: weakref.ref[FailureWatch], heartbeat: Heartbeat, stop: threading.Event
) -> None:
    while not stop.wait(POLL_INTERVAL_S):
        watch = reference()
        if watch is None or watch.is_over():
            send_left(heartbeat)
            return
        if not watch.poll():
            return
        del watch


def send_left(heartbeat: Heartbeat) -> None:
    """Nobody is to watch this rank any longer."""
    heartbeat.left = heartbeat.left or LEFT
    with suppress(StoreLost):
        heartbeat.send()


def describe_error(error: BaseException) -> str:
    """Its type, and what it says."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _is_consequence(error: BaseException) -> bool:
    """Whether it comes of another rank's end, by its type and text."""
    cause = error.__cause__ or error.__context__
    says = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return says or (cause is not None and _is_consequence(cause))


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
