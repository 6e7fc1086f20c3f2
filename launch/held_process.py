"""The process that will run the user's program: forked early, started late.

Forking after ``MPI_Init`` is what MPI libraries warn about (registered memory, progress threads), yet the
program's environment is known only when MPI has been asked. So the supervisor forks first, and the child
waits at a pipe, the gate, until its environment comes through; if the gate closes empty, it ends and nothing
has been started.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from gradsplit.launch.parent_death import end_with_parent

_CANNOT_RUN = 126
"""What shells return for a program that exists and cannot be run."""


class HeldProcess:
    """A child that waits to become ``command``. Create it before MPI and before any thread is started.

    The child leads a session of its own, so that what it starts itself (data loader workers) can be ended
    with it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        gate_reader, self._gate = os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            _wait_and_become(command, gate_reader, supervisor)
        os.close(gate_reader)
        self._released = False
        self.status: int | None = None
        """How the process ended: an exit code, or -N for signal N; None until `poll` has seen its end."""

    def release(self, environment: Mapping[str, str]) -> None:
        """Let the child run its command, with exactly ``environment``."""
        with os.fdopen(self._gate, "w") as gate:
            json.dump(dict(environment), gate)
        self._released = True

    def cancel(self) -> None:
        """End a child that was not released."""
        os.close(self._gate)
        os.waitpid(self.pid, 0)

    def poll(self) -> int | None:
        """Look whether the process has ended, and return `status`."""
        if self.status is None:
            pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(wait_status)
        return self.status

    def send(self, to_send: signal.Signals) -> None:
        """Send a signal to the process and to what it has started; no error when they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, to_send)

    def stop_now(self, grace_s: float) -> None:
        """End the process and what it has started: SIGTERM, up to ``grace_s`` seconds, SIGKILL."""
        if not self._released:
            self.cancel()
            return
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self.send(signal.SIGKILL)


def _wait_and_become(command: Sequence[str], gate_reader: int, supervisor: int) -> None:
    """Be the child; does not return."""
    try:
        os.setsid()
        end_with_parent(supervisor, signal.SIGKILL)
        with os.fdopen(gate_reader) as gate:
            text = gate.read()
        if text:
            # Python ignores SIGPIPE, and an ignored signal stays ignored in the program.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            # Open MPI 5 gives rank 0 a pipe on which the end never arrives: a script that reads would hang.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvpe(command[0], list(command), json.loads(text))
        os._exit(0)
    except OSError as error:
        print(f"launch: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(_CANNOT_RUN)
