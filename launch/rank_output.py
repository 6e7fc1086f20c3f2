"""What the processes write, on its way to the launcher's own output: by whole lines, so that ranks tear none.

A process whose launcher writes to a terminal sees one too, of the same size, and draws its colours and progress bars.
"""

import contextlib
import os
import select
import selectors
import termios
import threading
import tty

_IDLE_S = 0.05
"""How long a line without an end is waited for: a progress bar has none."""
_DRAIN_S = 1.0
"""How long what was written last may take to be read; what a process left in the background may still write."""


class RankOutput:
    """The output of this node's processes in one run, on its way from `open_streams` to `finish`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._child_ends: list[int] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def open_streams(self) -> tuple[int, int]:
        """Return what a process shall have as standard output and error."""
        return self._open(1), self._open(2)

    def _open(self, screen: int) -> int:
        reader, writer = _terminal_like(screen) if os.isatty(screen) else os.pipe()
        self._selector.register(reader, selectors.EVENT_READ, _Stream(screen))
        self._child_ends.append(writer)
        return writer

    def start(self) -> None:
        """Carry from now on; all processes have been started."""
        for writer in self._child_ends:
            os.close(writer)
        self._thread.start()

    def finish(self) -> None:
        """Return when everything that was written has been carried."""
        self._thread.join(_DRAIN_S)

    def _carry(self) -> None:
        while self._selector.get_map():
            ready = self._selector.select(_IDLE_S)
            for key, _ in ready:
                try:
                    piece = os.read(key.fd, 65536)
                except OSError:  # How a terminal says that all its writers have gone.
                    piece = b""
                key.data.add(piece)
                if not piece:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if not ready:
                for key in self._selector.get_map().values():
                    key.data.flush()


class _Stream:
    """One stream of one process."""

    def __init__(self, screen: int) -> None:
        self._screen = screen
        self._pending = b""

    def add(self, piece: bytes) -> None:
        """Take what has been read; nothing at the end."""
        self._pending += piece
        whole = max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1 if piece else None
        self.flush(whole)

    def flush(self, size: int | None = None) -> None:
        show, self._pending = self._pending[:size], b"" if size is None else self._pending[size:]
        while show:
            try:
                show = show[os.write(self._screen, show) :]
            except BlockingIOError:  # Somebody else has set the terminal so.
                select.select([], [self._screen], [])
            except OSError:  # Nobody reads: the processes go on.
                return


def _terminal_like(screen: int) -> tuple[int, int]:
    """Return both ends of a pseudo-terminal of the size of ``screen``, which changes nothing that is written."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    with contextlib.suppress(OSError):
        termios.tcsetwinsize(writer, termios.tcgetwinsize(screen))
    return reader, writer
