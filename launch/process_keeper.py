"""A small process that starts the processes of the user's program, and ends them when it loses its supervisor.

The supervisor could start them itself, but not end them when it is killed; the kernel ends a child with its parent
(``parent_death``), but not what that child has started, data loader workers for example. Whoever else is to end them
has to know of each from the moment it exists, and so starts it. The keeper is forked before MPI and before any
thread: what it starts inherits neither.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from gradsplit.launch.received_signals import PASSED_ON

CANNOT_RUN = 126
"""What shells return for a program that exists and cannot be run."""
_HEADER_BYTES = 8


class RankProcess:
    """One process of the user's program. It leads a session of its own: what it starts itself can be ended with it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        """How it ended, as the keeper has reported: an exit code, or -N for signal N; None while it runs."""
        self.ended_s = 0.0
        """When it ended, by the clock."""

    def send(self, to_send: signal.Signals) -> None:
        """Send a signal to the process and to what it has started; no error when they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, to_send)

    def send_alone(self, to_send: signal.Signals) -> None:
        """Send a signal to the process itself; what it has started may not know what to do with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, to_send)


class ProcessKeeper:
    """The supervisor's end of it."""

    def __init__(self, ending: Collection[int], note_end: Callable[[], None]) -> None:
        """``ending``: the signals that end the job, of which the supervisor decides what to do. ``note_end``: called by
        the keeper when the supervisor has ended, however it did.
        """
        self._socket, theirs = socket.socketpair()
        self._processes: dict[int, RankProcess] = {}
        self._heard = b""
        self._started: RankProcess | None = None
        self._pid = os.fork()
        if self._pid == 0:
            _keep(theirs, PASSED_ON | frozenset(ending), note_end)
        theirs.close()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        standard_output: int,
        standard_error: int,
        processors: Sequence[int] = (),
    ) -> RankProcess:
        """Start ``command`` with exactly ``environment``, on ``processors`` if given; its standard input is empty."""
        order = json.dumps([list(command), dict(environment), list(processors)]).encode()
        header = len(order).to_bytes(_HEADER_BYTES)
        socket.send_fds(self._socket, [header], [standard_output, standard_error])
        self._socket.sendall(order)
        self._started = None
        while self._started is None:
            self._listen(None)
        return self._started

    def look(self) -> None:
        """Bring the processes' `RankProcess.status` up to date."""
        self._listen(0)

    def close(self) -> None:
        """End the keeper, and with it the processes that still run."""
        if self._pid:
            self._socket.close()
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _listen(self, timeout_s: float | None) -> None:
        """Receive what the keeper has sent: ``PID`` of a process it started, ``PID STATUS TIME`` of one that ended."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return
        received = self._socket.recv(65536)
        if not received:
            for process in self._processes.values():
                process.send(signal.SIGKILL)
            raise ChildProcessError("the launcher's own process that starts and ends the ranks has gone")
        *lines, self._heard = (self._heard + received).split(b"\n")
        for line in lines:
            pid, *end = line.split()
            if end:
                process = self._processes.pop(int(pid))
                process.status, process.ended_s = int(end[0]), float(end[1])
            else:
                self._started = self._processes[int(pid)] = RankProcess(int(pid))


def _keep(supervisor: socket.socket, survived: Collection[int], note_end: Callable[[], None]) -> None:
    """Be the keeper; does not return.

    ``survived``: signals that are the supervisor's business. Slurm may send one to every process of a job.
    """
    running: set[int] = set()
    try:
        os.setsid()  # Out of reach of Ctrl-C and of what ends the supervisor's group.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # Who reads the job's output would otherwise wait for the keeper.
            os.dup2(nowhere, stream)
        os.closerange(3, supervisor.fileno())
        os.closerange(supervisor.fileno() + 1, supervisor.fileno() + 1024)
        ends, signalled = os.pipe()
        os.set_blocking(signalled, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *survived):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        while True:
            ready, _, _ = select.select([supervisor, ends], [], [])
            if ends in ready:
                os.read(ends, 4096)
                for pid in sorted(running):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        running.remove(pid)
                        supervisor.sendall(
                            f"{pid} {os.waitstatus_to_exitcode(status)} {time.time()}\n".encode()
                        )
            if supervisor in ready:
                header, streams, _, _ = socket.recv_fds(supervisor, _HEADER_BYTES, 2)
                if not header:
                    break
                order = b""
                while len(order) < int.from_bytes(header):
                    order += supervisor.recv(int.from_bytes(header) - len(order))
                # A signal to the new process shall not be lost to the keeper's handler.
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, survived)
                pid = os.fork()
                if pid == 0:
                    _become(*json.loads(order), *streams, blocked=blocked)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                running.add(pid)
                for stream in streams:
                    os.close(stream)
                supervisor.sendall(f"{pid}\n".encode())
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            note_end()
        os._exit(0)


def _become(
    command: list[str],
    environment: dict[str, str],
    processors: list[int],
    standard_output: int,
    standard_error: int,
    blocked: Collection[int],
) -> None:
    """Be a process of the user's program, with these signals ``blocked``; does not return."""
    try:
        os.setsid()
        if processors:
            os.sched_setaffinity(0, processors)
        os.dup2(standard_output, 1)
        os.dup2(standard_error, 2)
        os.close(standard_output)
        os.close(standard_error)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores them, and an ignored signal stays ignored.
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"launch: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(CANNOT_RUN)
