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
from dataclasses import asdict
from typing import IO

import torch

from gradsplit.compile_core.minimizer.outcome import Outcome


def in_a_fork(run: Callable[[], Outcome], limit_s: float) -> Outcome:
    """What ``run`` returns in a child process.

    Returns:
        Its outcome; "crashes" with the signal that ended the child and its last words on stderr, "hangs"
        after ``limit_s`` seconds.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.close(reading)
            _answer(run, writing, errors.fileno())
        os.close(writing)
        try:
            answer = _read(reading, time.monotonic() + limit_s)
        finally:
            os.close(reading)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        said = _last_words(errors)
    if answer is None:
        return Outcome("hangs", "", f"for {limit_s:.0f} s")
    if answer:
        return Outcome(**json.loads(answer))
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


def _read(reading: int, deadline: float) -> str | None:
    """All that the child writes; ``None`` if it still lives at the deadline."""
    parts = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return None
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
