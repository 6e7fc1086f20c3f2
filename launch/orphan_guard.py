"""A small process that ends the ranks' processes when their supervisor was killed and could not do so itself.

The kernel can end a child with its parent (``parent_death``), but not what that child has started, data loader
workers for example. The guard holds a pipe to the supervisor, and at its end kills the process groups that are left.
"""

import contextlib
import os
import signal


class OrphanGuard:
    """Watches this process from now on. Create it before MPI and before any thread is started."""

    def __init__(self) -> None:
        reader, self._changes = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(reader)
        os.close(reader)

    def add(self, group: int | None) -> None:
        """Kill process group ``group`` when this process ends without having said otherwise."""
        self._tell(group, "+")

    def forget(self, group: int | None) -> None:
        """Leave a process group alone from now on: its number may soon be another's."""
        self._tell(group, "-")

    def _tell(self, group: int | None, change: str) -> None:
        if group is not None:
            os.write(self._changes, f"{change}{group}\n".encode())

    def close(self) -> None:
        """End the guard, which kills the groups that it was not told to forget."""
        if self._pid:
            os.close(self._changes)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _watch(reader: int) -> None:
    """Be the guard; does not return."""
    groups: dict[int, bool] = {}
    try:
        os.setsid()  # Out of reach of Ctrl-C and of what ends the supervisor's group.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # Who reads the job's output would otherwise wait for the guard.
            os.dup2(nowhere, stream)
        os.closerange(3, reader)
        os.closerange(reader + 1, reader + 1024)
        with os.fdopen(reader) as changes:
            for change in changes:
                groups[int(change[1:])] = change[0] == "+"
        for group, left in groups.items():
            if left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
