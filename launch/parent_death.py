"""Processes that end with their parent, also when that was killed and could not end them itself (Linux)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
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
