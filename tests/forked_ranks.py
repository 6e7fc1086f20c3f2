"""Ranks, and other programs, that are forks of processes which have imported torch: importing it takes seconds of a
processor.

A rank is a program of its own in all else. It has its own environment, arguments and output, imports gradsplit itself,
and ends as a process ends. Ranks of even and of odd numbers are forks of two processes, so that they hash strings
differently, as ranks do. What a launcher does is not done here: ``start_ranks.py`` starts ranks by ours.

``python -m tests.forked_ranks`` is the process that forks. It reads a program a line, JSON, and writes ``started PID``
and, when one has ended, ``ended PID STATUS``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.start_ranks import ROOT, free_port, python_path, rank_environment


class ForkedRank:
    """A rank that runs, with the part of ``subprocess.Popen``'s interface that tests need."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._server.status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with the process {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_rank(
    program: Sequence[str], rank: int, processes: int, port: str, said: Path, **environment: str
) -> ForkedRank:
    """One of the ranks of a job on this machine.

    Args:
        program: the arguments of ``python``: ``-m MODULE ...`` or ``FILE ...``.
        port: where rank 0 has the store.
        said: the file of its output and its errors.
        environment: variables beside those of this process.
    """
    variables = {**os.environ, **rank_environment(rank, processes, port), **environment}
    return _server(rank % 2).start(program, ROOT, variables, said, said)


def fork_ranks(
    program: Sequence[str], timeout_s: float, processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program on several ranks; when one fails, the others are killed.

    Returns:
        All that they said, a rank after the other, as ``stdout``.
    """
    with tempfile.TemporaryDirectory() as name:
        said = [Path(name) / str(rank) for rank in range(processes)]
        port, deadline = free_port(), time.monotonic() + timeout_s
        ranks = [
            fork_rank(program, rank, processes, port, said[rank], **environment) for rank in range(processes)
        ]
        try:
            while True:
                statuses = [rank.poll() for rank in ranks]
                failed = next((status for status in statuses if status), 0)
                if failed or None not in statuses:
                    break
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(list(program), timeout_s, "".join(_texts(said)))
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return subprocess.CompletedProcess(list(program), failed, "".join(_texts(said)), "")


def run_forked(
    program: Sequence[str], folder: Path, timeout_s: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program without ranks in ``folder``, as ``python -m MODULE ...``, ``-c TEXT`` or ``FILE ...`` would."""
    with tempfile.TemporaryDirectory() as name:
        said = [Path(name) / "out", Path(name) / "error"]
        running = _server(0).start(program, folder, {**os.environ, **environment}, *said)
        try:
            status = running.wait(timeout_s)
        finally:
            running.kill()
        return subprocess.CompletedProcess(list(program), status, *_texts(said))


def _texts(said: Sequence[Path]) -> list[str]:
    return [path.read_text() for path in said]


class _Server:
    """The other end of ``_serve``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_ranks"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._lock = threading.RLock()  # threads may run programs side by side
        self._received = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(
        self, program: Sequence[str], folder: Path, variables: dict[str, str], *said: Path
    ) -> ForkedRank:
        request = {
            "program": list(program),
            "folder": str(folder),
            "environment": variables,
            "said": list(map(str, said)),
        }
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            while not self._started:
                self._receive(timeout_s=60)
            return ForkedRank(self, self._started.pop())

    def status(self, pid: int) -> int | None:
        with self._lock:
            self._receive(timeout_s=0)
            return self._ended.get(pid)

    def _receive(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], timeout_s)[0]:
            part = self._process.stdout.read(1 << 16)
            assert part, "the process that forks ranks has ended"
            *lines, self._received = (self._received + part).split(b"\n")
            for what, *numbers in map(bytes.split, lines):
                if what == b"started":
                    self._started.append(int(numbers[0]))
                else:
                    self._ended[int(numbers[0])] = int(numbers[1])
            timeout_s = 0


@functools.cache
def _server(which: int) -> _Server:
    return _Server()


def _serve() -> dict[str, Any]:
    """Forks; returns in each fork, with what it shall run."""
    answers, waiting = os.dup(1), b""
    os.dup2(2, 1)
    running: set[int] = set()
    while True:
        if select.select([0], [], [], 0.02 if running else None)[0]:
            part = os.read(0, 1 << 16)
            if not part:  # who asked has ended
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, waiting = (waiting + part).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    return json.loads(line)  # type: ignore[no-any-return]
                running.add(pid)
                os.write(answers, b"started %d\n" % pid)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                os.write(answers, b"ended %d %d\n" % (pid, os.waitstatus_to_exitcode(status)))


def _become(request: dict[str, Any]) -> None:
    """Runs a program as this process would have done from the start."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, said in zip((1, 2), request["said"], strict=True):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    program, *arguments = request["program"]
    first = str(Path(program).absolute().parent) if program not in ("-m", "-c") else os.getcwd()
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path[:1] = [first, *more]
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def _import_what_ranks_import() -> None:
    import networkx  # noqa: F401
    import numpy.random  # noqa: F401
    import sympy  # noqa: F401
    import torch._dynamo
    import torch.distributed.optim
    import torch.fx.experimental.proxy_tensor
    import torch.nn.parallel.distributed  # noqa: F401

    gc.collect()
    gc.freeze()  # so that no fork's search copies what they share


if __name__ == "__main__":
    _import_what_ranks_import()
    _become(_serve())
