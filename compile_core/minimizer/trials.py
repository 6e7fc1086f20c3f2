"""Trials of graphs, each in a fork of this process: one may crash or hang.

This process imports everything once and runs nothing itself, neither on a GPU nor in threads, so that its forks may.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch

from gradsplit.compile_core.minimizer.outcome import Outcome

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of a processor: ranks that wait for each other look around in gloo's loops, with 0.5 % each.
_IDLE_SHARE = 0.03


def in_a_fork(run: Callable[[], Outcome], limit_s: float, idle_limit_s: float | None = None) -> Outcome:
    """What ``run`` returns in a child process.

    Args:
        limit_s: after so many seconds it hangs.
        idle_limit_s: after so many in which neither the child nor what it has started computes anything, too. Only for
            what has nothing to wait for, and where the system has ``/proc``.

    Returns:
        Its outcome; "crashes" with the signal that ended the child and its last words on stderr, or "hangs".
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(reading)
            _answer(run, writing, errors.fileno())
        os.close(writing)
        try:
            answer = _read(reading, child, limit_s, idle_limit_s)
        finally:
            os.close(reading)
        if answer is None:
            for kill in (os.killpg, os.kill):  # with what it has started, if it has come that far
                with suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        said = _last_words(errors)
    if answer is None:
        return Outcome("hangs")
    if answer:
        return Outcome(**json.loads(answer))
    return crashed(status, said)


def crashed(status: int, said: str = "") -> Outcome:
    """The outcome of a process that gave none.

    Args:
        status: as ``os.waitpid`` returns it.
        said: its last words.
    """
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome("crashes", name, name + said)
    code = os.WEXITSTATUS(status)
    return Outcome("crashes", f"exit {code}", f"with exit code {code}{said}")


def _last_words(errors: IO[bytes]) -> str:
    """What a C++ exception says that nobody caught, else the last line; "" for none."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    words = next((line for line in lines if line.strip().startswith("what():")), lines[-1] if lines else "")
    return f": {words.strip()}" if words else ""


def _answer(run: Callable[[], Outcome], writing: int, errors: int) -> None:
    """In the child, which never returns: destructors and exit handlers are the parent's."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(errors, 2)
        # Torch makes its pool of threads anew at the first use after a fork, which must not come from several at once.
        torch.set_num_threads(torch.get_num_threads())
        with os.fdopen(writing, "w") as pipe:
            json.dump(asdict(run()), pipe)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _read(reading: int, child: int, limit_s: float, idle_limit_s: float | None) -> str | None:
    """All that the child writes; ``None`` if it hangs."""
    parts = []
    began = active = time.monotonic()
    ticks: int | None = None
    while True:
        if select.select([reading], [], [], min(limit_s, 0.5))[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
        now = time.monotonic()
        if idle_limit_s is not None:
            used = _processor_ticks(child)
            if used is None or ticks is None or used - ticks > _IDLE_SHARE * _TICKS_PER_S * (now - active):
                ticks, active = used, now
        if now - began > limit_s or (idle_limit_s is not None and now - active > idle_limit_s):
            return None


def _processor_ticks(session: int) -> int | None:
    """Processor time of all processes of a session that live; ``None`` where nobody knows."""
    ticks = None
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the program's name, which may have spaces: state, parent, group, session, ... user and system time.
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if words[3] == str(session):
            ticks = (ticks or 0) + int(words[11]) + int(words[12])
    return ticks
