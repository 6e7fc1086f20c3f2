"""What the ranks tell the launcher that started ``mpiexec``: in files, since an ``mpiexec`` may die at any moment.

Open MPI's has crashed while it ended a failed job: its own exit code says nothing of the ranks then, and what they
wrote to the screen through it may be lost. The files lie in the launcher's folder, in ``--log-dir`` where that is given
(a cluster's machines share it as a rule); ranks on a machine without it tell through ``mpiexec``.
"""

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GRADSPLIT_LAUNCH_RECORD"
"""Carries the folder's path to the ranks."""
_BEGUN, _END = "begun", "end"
_LOCK = "ranks"


@dataclass(frozen=True, order=True)
class Outcome:
    """How the job ended, or would have: ordered by time."""

    time_s: float
    exit_code: int
    told: str
    """What stands last on the screen."""


class JobRecord:
    """The folder, as ranks and launcher see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, rank: int | None) -> None:
        """Called by a rank: it runs from now on, until its process ends."""
        if rank == 0:
            (self._folder / _BEGUN).touch()
        fcntl.flock(os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), fcntl.LOCK_SH)

    def note_failure(self, rank: int, outcome: Outcome | None) -> None:
        """Note that a process of supervisor ``rank`` has failed; None takes it back, for the group starts again."""
        self._write(f"failed_{rank}", outcome)

    def note_end(self, outcome: Outcome) -> None:
        """Note how the job has ended: what all ranks have agreed on."""
        self._write(_END, outcome)

    def wait_for_ranks(self, timeout_s: float) -> bool:
        """Wait until no rank runs that sees the folder; return whether there has been any."""
        if not (self._folder / _LOCK).exists():
            return False
        lock = os.open(self._folder / _LOCK, os.O_RDWR)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        os.close(lock)
        return True

    def has_ended(self) -> bool:
        """Return whether an end is noted."""
        return (self._folder / _END).exists()

    def ends_untold(self) -> bool:
        """Return whether rank 0, which would have noted an end here, has not: something ended it."""
        return (self._folder / _BEGUN).exists() and not self.has_ended()

    def outcome(self, until_s: float) -> Outcome | None:
        """Return how the job ended, or else its first failure until ``until_s``; None where the ranks say nothing."""
        if self.has_ended():
            return self._read(self._folder / _END)
        failures = [self._read(file) for file in self._folder.glob("failed_*[0-9]")]
        return min((failure for failure in failures if failure.time_s <= until_s), default=None)

    def _write(self, name: str, outcome: Outcome | None) -> None:
        if outcome is None:
            (self._folder / name).unlink(missing_ok=True)
            return
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_text(json.dumps([outcome.time_s, outcome.exit_code, outcome.told]))
        unfinished.replace(self._folder / name)

    @staticmethod
    def _read(file: Path) -> Outcome:
        return Outcome(*json.loads(file.read_text()))
