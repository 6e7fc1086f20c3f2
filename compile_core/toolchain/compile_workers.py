"""Processes that compile, one request at a time each, while this process does something else.

They are processes and not forks, since this process has threads and a GPU; and they are started when a request finds no
idle one, or ahead of the requests. Of those that are started together only one imports anything, if their script knows
how: it forks the others, and then waits for them. A process that dies (killed for its memory, crashed, or gone because
it was idle for long) is replaced once; a request that kills two is an error. When this process ends, their input does,
and so do they.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradsplit.compile_core.errors import CompileError

_ANSWER_TIMEOUT_S = 600.0


class CompileWorkers:
    """Runs a Python script in as many processes as there are requests at the same time, up to one for each processor:
    each further one would be started only to keep others waiting. There may be fewer: what one does before it answers
    its first request is spent once more for each.

    The script reads requests from its input and answers each on its output, JSON, a line each.
    """

    def __init__(self, script: Path, forks: bool = False, most: int | None = None) -> None:
        """
        Args:
            forks: the script takes pairs of descriptors as arguments, "requests,answers", and becomes as many
                processes.
            most: processes at the same time, even where there are more processors.
        """
        self._script = script
        self._most = most
        self._forks = forks
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    @property
    def most(self) -> int:
        """How many requests are answered at the same time."""
        return min(usable_processors(), self._most or usable_processors())

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; threads may ask at the same time, and wait where all processors are taken.

        Raises:
            CompileError: no process could be started, two died of it, or there was no answer in a long time.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._processor():
            return self._answer(line)

    @contextmanager
    def _processor(self) -> Iterator[None]:
        """Waits for one, in the order of asking: a step may wait for a kernel while others are compiled for later."""
        turn = threading.Condition(self._lock)
        with self._lock:
            self._waiting.append(turn)
            try:
                turn.wait_for(lambda: self._waiting[0] is turn and self._running < self.most)
                self._running += 1
            finally:
                self._waiting.remove(turn)
                self._call_first()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._call_first()

    def _call_first(self) -> None:
        """It alone: where there are many processors, many threads wait, and to wake all takes longer than a kernel."""
        if self._waiting:
            self._waiting[0].notify()

    def _answer(self, line: bytes) -> dict[str, Any]:
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
        self._groups = [group for group in self._groups if group.poll() is None]
        missing = count - len(self._idle)
        if self._forks and missing > 1:
            group, workers = _forked(self._script, missing)
            self._groups.append(group)
            self._idle += workers
        while len(self._idle) < count:
            self._idle.append(_alone(self._script))

    def close(self) -> None:
        """Ends the idle processes, and those that were started together with one."""
        while self._idle:
            self._idle.pop().stop()
        while self._groups:
            _end_group(self._groups.pop())

    def _take(self, fresh: bool) -> _Worker:
        if not fresh:
            with suppress(IndexError):
                # The one that has been started first is ready.
                return self._idle.pop(0)
        return _alone(self._script)

    def _forget(self) -> None:
        """Those that there are are the parent's."""
        self._idle: list[_Worker] = []
        self._groups: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []
        self._running = 0


class _DiedError(Exception):
    """A worker is gone."""


def _popen(
    script: Path, arguments: Sequence[str], stdin: int, stdout: int | None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    # -P: the script's own folder is no place to import from.
    command = [sys.executable, "-P", str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.Popen(
            command, bufsize=0, stdin=stdin, stdout=stdout, env=environment, pass_fds=pass_fds
        )
    except OSError as error:
        raise CompileError(f"{command} cannot be started: {error}") from error


def _alone(script: Path) -> _Worker:
    process = _popen(script, (), subprocess.PIPE, subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    return _Worker(process, process.stdin, process.stdout, is_alone=True)


def _forked(script: Path, count: int) -> tuple[subprocess.Popen[bytes], list[_Worker]]:
    """Workers that one process becomes, and that process."""
    requests, answers = ([os.pipe() for _ in range(count)] for _ in range(2))
    theirs = [(taken[0], given[1]) for taken, given in zip(requests, answers, strict=True)]
    try:
        pairs = [f"{taken},{given}" for taken, given in theirs]
        given_on = [descriptor for pair in theirs for descriptor in pair]
        process = _popen(script, pairs, subprocess.DEVNULL, None, given_on)
    except CompileError:
        for reader, writer in (*requests, *answers):
            os.close(reader)
            os.close(writer)
        raise
    for descriptor in given_on:
        os.close(descriptor)
    ours = zip(requests, answers, strict=True)
    return process, [
        _Worker(process, os.fdopen(given[1], "wb", 0), os.fdopen(taken[0], "rb", 0), is_alone=False)
        for given, taken in ours
    ]


def _end_group(group: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has forked: it sees to that when it is told to end."""
    group.terminate()
    group.wait()


@dataclass(frozen=True)
class _Worker:
    """A process that takes requests, one at a time.

    Attributes:
        process: itself, or the one that has forked it.
    """

    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: IO[bytes]
    is_alone: bool

    def answer(self, line: bytes) -> dict[str, Any]:
        received = b""
        try:
            self.requests.write(line)
            while not received.endswith(b"\n"):
                if not select.select([self.answers], [], [], _ANSWER_TIMEOUT_S)[0]:
                    if not self.is_alone:
                        _end_group(self.process)  # the others' requests are made again
                    raise _DiedError(f"no answer in {_ANSWER_TIMEOUT_S:.0f} s")
                part = self.answers.read(1 << 16)
                if not part:
                    raise _DiedError(f"exit status {self.process.wait(10)}" if self.is_alone else "it ended")
                received += part
        except (BrokenPipeError, subprocess.TimeoutExpired) as error:
            raise _DiedError(str(error)) from None
        return json.loads(received)

    def has_ended(self) -> bool:
        """Of one that has no request."""
        return bool(select.select([self.answers], [], [], 0)[0])

    def stop(self) -> None:
        """One that has forked from another ends when there can be no more requests."""
        if self.is_alone:
            self.process.kill()
            self.process.wait()
        self.requests.close()
        self.answers.close()


def usable_processors() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
