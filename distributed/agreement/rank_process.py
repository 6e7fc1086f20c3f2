"""Whether the process of another rank lives, as far as its machine knows: one that only gets no processor time sends no
heartbeat, either."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType

_PROC = Path("/proc")
# Where code lies that is not the user's.
_OTHERS = tuple(
    {"<", str(Path(__file__).parents[2]) + os.sep}
    | {sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")}
)


class State(Enum):
    """What is known of a process."""

    RUNS = "runs"
    STOPPED = "has been stopped, as by SIGSTOP"
    GONE = "has ended without a word, as one that is killed does"
    UNKNOWN = "has stopped, or its machine cannot be reached"


def this_process() -> list[str]:
    """What others need to look for this process: the machine's boot and the namespace of process ids, id, and start."""
    with suppress(OSError):
        space = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return [f"{space} {os.readlink(_PROC / 'self/ns/pid')}", str(os.getpid()), _stat(str(os.getpid()))[1]]
    return ["", str(os.getpid()), ""]


def state_of(process: list[str]) -> State:
    """Of a process that said this of itself."""
    space, pid, start = process
    if not space or space != this_process()[0]:
        return State.UNKNOWN
    try:
        state, started = _stat(pid)
    except OSError:  # or it is not for everybody to see
        return State.GONE if (_PROC / "1").exists() else State.UNKNOWN
    if started != start or state in "ZXx":
        return State.GONE
    return State.STOPPED if state in "Tt" else State.RUNS


def _stat(pid: str) -> tuple[str, str]:
    """State and start; the name before may have blanks and parentheses."""
    fields = (_PROC / pid / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def place_of_main_thread() -> str:
    """The line of the user's program at which the main thread is now, or ""."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OTHERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
