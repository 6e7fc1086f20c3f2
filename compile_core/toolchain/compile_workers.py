"""Processes that compile, one request at a time each, while this process does something else.

They are processes and not forks, since this process has threads and a GPU; and they are started when a request finds no
idle one, or ahead of the requests. A process that dies (killed for its memory, crashed, or gone because it was idle for
long) is replaced once; a request that kills two is an error. When this process ends, their input does, and so do they.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsplit.compile_core.errors import CompileError

_ANSWER_TIMEOUT_S = 600.0


class CompileWorkers:
    """Runs a Python script in as many processes as there are requests at the same time.

    The script reads requests from its input and answers each on its output, JSON, a line each.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._idle: list[_Worker] = []
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; threads may ask at the same time.

        Raises:
            CompileError: no process could be started, two died of it, or there was no answer in a long time.
        """
        line = json.dumps(request).encode() + b"\n"
        for is_last in (False, True):
            worker = self._take(fresh=is_last)
            try:
                answer = worker.answer(line)
            except _DiedError as died:
                worker.stop()
                if is_last:
                    raise CompileError(f"the process that compiles died: {died}") from None
                continue
            self._idle.append(worker)
            return answer
        raise AssertionError("not reached")

    def start(self, count: int) -> None:
        """Sees to it that so many wait for requests; they take a second to be ready, which nobody waits for here.

        Raises:
            CompileError: a process could not be started.
        """
        for worker in list(self._idle):
            if worker.has_ended():
                with suppress(ValueError):  # taken meanwhile
                    self._idle.remove(worker)
                    worker.stop()
        while len(self._idle) < count:
            self._idle.append(_Worker(self._script))

    def close(self) -> None:
        """Ends the idle processes."""
        while self._idle:
            self._idle.pop().stop()

    def _take(self, fresh: bool) -> _Worker:
        if not fresh:
            with suppress(IndexError):
                # The one that has been started first is ready.
                return self._idle.pop(0)
        return _Worker(self._script)

    def _forget(self) -> None:
        self._idle = []  # they are the parent's


class _DiedError(Exception):
    """A worker is gone."""


class _Worker:
    def __init__(self, script: Path) -> None:
        # -P: the script's own folder is no place to import from.
        command: Sequence[str] = [sys.executable, "-P", str(script)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
            )
        except OSError as error:
            raise CompileError(f"{command} cannot be started: {error}") from error

    def answer(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        received = b""
        try:
            self._process.stdin.write(line)
            while not received.endswith(b"\n"):
                if not select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)[0]:
                    raise _DiedError(f"no answer in {_ANSWER_TIMEOUT_S:.0f} s")
                part = self._process.stdout.read(1 << 16)
                if not part:
                    raise _DiedError(f"exit status {self._process.wait(10)}")
                received += part
        except (BrokenPipeError, subprocess.TimeoutExpired) as error:
            raise _DiedError(str(error)) from None
        return json.loads(received)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def usable_processors() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
