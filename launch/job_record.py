"""What the ranks report to the launcher that started ``mpiexec``: in files, since an ``mpiexec`` may die at any moment.

Open MPI's has crashed while it ended a failed job: its own exit code says nothing of the ranks then, and what they
wrote to the screen through it may be lost. The files lie in the launcher's folder, in ``--log-dir`` where that is given
(a cluster's machines share it as a rule); ranks on a machine without it report through ``mpiexec``.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GRADSPLIT_LAUNCH_RECORD"
"""Carries the folder's path to the ranks."""
_NOTES_S = 1.0
_BEGUN, _LEFT, _GONE, _FAILED, _END = "begun_", "left_", "gone_", "failed_", "end"


@dataclass(frozen=True, order=True)
class JobOutcome:
    """How the job ended, or would have: ordered by time."""

    time_s: float
    exit_code: int
    message: str
    """What is printed last."""


class JobRecord:
    """The folder, as ranks and launcher see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[int] = set()

    def enter(self, rank: int | None) -> None:
        """Called by a supervisor: it runs from now on, until its process ends."""
        unfinished = self._folder / f"{_BEGUN}{rank}.unfinished"
        unfinished.write_text(socket.gethostname())
        with contextlib.suppress(OSError):  # Not every file system has locks.
            fcntl.flock(os.open(unfinished, os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH)
        unfinished.replace(self._folder / f"{_BEGUN}{rank}")

    def note_leaving(self, rank: int | None) -> None:
        """Called by a supervisor that ends on purpose, or by a signal."""
        self._note_time(f"{_LEFT}{rank}")

    def note_gone(self, rank: int | None) -> None:
        """Called for a supervisor that has ended, however it did."""
        self._note_time(f"{_GONE}{rank}")

    def note_failure(self, rank: int, outcome: JobOutcome | None) -> None:
        """Note that a process of supervisor ``rank`` has failed; None takes it back, for the group starts again."""
        self._write(f"{_FAILED}{rank}", outcome)

    def note_end(self, outcome: JobOutcome) -> None:
        """Note how the job has ended: what all ranks have agreed on."""
        self._write(_END, outcome)

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until no supervisor runs that sees the folder, and until that is noted, which a machine that has ended
        does not do.
        """
        deadline = time.monotonic() + timeout_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + _NOTES_S
        while not (self.has_ended() or self._begun().keys() <= self._times(_GONE).keys()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)

    def has_begun(self) -> bool:
        """Return whether there has been a supervisor that sees the folder."""
        return bool(self._begun())

    def misses_one(self) -> bool:
        """Return whether a supervisor that an earlier call has seen run does so no more.

        Who never was seen is not missed: on some file systems, machines do not see each other's locks.
        """
        running = self._running()
        self._seen |= running
        return self._seen != running

    def first_gone(self) -> tuple[str, list[int]] | None:
        """Return the machine and ranks of the supervisors that ended without a note, before others did or had to.

        Where Open MPI's library misses one, it ends the others without a note, too. None where the first is unknown.
        """
        begun, left, gone = self._begun(), self._times(_LEFT), self._times(_GONE)
        ends = {rank: left.get(rank, gone.get(rank, 0.0)) for rank in begun}
        first = [rank for rank, time_s in ends.items() if time_s == min(ends.values())]
        machines = {begun[rank].read_text() for rank in first}
        if len(machines) != 1 or len(first) == len(begun) or left.keys() & first:
            return None
        return machines.pop(), sorted(first)

    def has_ended(self) -> bool:
        """Return whether an end is noted."""
        return (self._folder / _END).exists()

    def lacks_end(self) -> bool:
        """Return whether rank 0, which would have noted an end here, has not: something ended it."""
        return 0 in self._begun() and not self.has_ended()

    def outcome(self, until_s: float) -> JobOutcome | None:
        """Return how the job ended, or else its first failure until ``until_s``; None where the ranks say nothing."""
        if self.has_ended():
            return self._read(self._folder / _END)
        failures = map(self._read, self._files(_FAILED).values())
        return min((failure for failure in failures if failure.time_s <= until_s), default=None)

    def _files(self, name: str) -> dict[int, Path]:
        return {int(file.name.removeprefix(name)): file for file in self._folder.glob(f"{name}*[0-9]")}

    def _begun(self) -> dict[int, Path]:
        return self._files(_BEGUN)

    def _times(self, name: str) -> dict[int, float]:
        return {rank: float(file.read_text()) for rank, file in self._files(name).items()}

    def _note_time(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # The launcher has gone already, with the folder.
            self._replace(name, str(time.time()))

    def _running(self) -> set[int]:
        running = set()
        for rank, file in self._begun().items():
            with file.open("r+") as opened:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    running.add(rank)
                except OSError:
                    pass  # No locks here.
        return running

    def _write(self, name: str, outcome: JobOutcome | None) -> None:
        if outcome is None:
            (self._folder / name).unlink(missing_ok=True)
            return
        self._replace(name, json.dumps([outcome.time_s, outcome.exit_code, outcome.message]))

    def _replace(self, name: str, text: str) -> None:
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_text(text)
        unfinished.replace(self._folder / name)

    @staticmethod
    def _read(file: Path) -> JobOutcome:
        return JobOutcome(*json.loads(file.read_text()))
