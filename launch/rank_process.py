"""One process of the user's program.

It is started after MPI, of which it must inherit nothing: the standard library starts a program by ``vfork`` and
``exec``, which copies no memory, runs no fork handlers and closes every open file.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

CANNOT_RUN = 126
"""What shells return for a program that exists and cannot be run."""


class RankProcess:
    """A running ``command``. It leads a session of its own, so that what it starts itself can be ended with it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        standard_output: int,
        standard_error: int,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=standard_output,
                stderr=standard_error,
                start_new_session=True,
            )
        except OSError as error:
            print(f"launch: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)

    @property
    def group(self) -> int | None:
        """The process group, which is the process and what it has started; None when it could not be run."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return how the process ended: an exit code, or -N for signal N; None while it runs."""
        return CANNOT_RUN if self._process is None else self._process.poll()

    def send(self, to_send: signal.Signals) -> None:
        """Send a signal to the process and to what it has started; no error when they are gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, to_send)

    def send_alone(self, to_send: signal.Signals) -> None:
        """Send a signal to the process itself; what it has started may not know what to do with it."""
        if self._process is not None:
            self._process.send_signal(to_send)
