"""Processes that end with their parent, also when that was killed and could not end them itself (Linux)."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_C_LIBRARY = ctypes.CDLL(None)  # Loaded early: a forked child should do as little as possible.


def end_with_parent(parent: int, with_signal: signal.Signals) -> None:
    """Have the kernel send ``with_signal`` to this process when its parent, process ``parent``, ends.

    The wish outlives ``exec``. Elsewhere than on Linux it does nothing: there, killing a launcher with
    SIGKILL leaves its children running.
    """
    if sys.platform != "linux":
        return
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:  # It ended before the wish was heard.
        os.kill(os.getpid(), with_signal)


def adopt_orphans() -> None:
    """Have the kernel give this process the descendants whose parents end, in place of process 1."""
    if sys.platform == "linux":
        _C_LIBRARY.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill all children of this process, those that it has adopted and those that come while it does so."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists() and (pids := children.read_text().split()):
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
