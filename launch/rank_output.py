"""What the processes write, on its way to the launcher's own output, by whole lines so that none is torn, and to files.

A process whose launcher writes to a terminal sees one too, of the same size, and draws its colours and progress bars.
Bars of several processes would draw over each other: of all but the first only what a bar shows at its end is shown.
"""

import contextlib
import os
import re
import select
import selectors
import termios
import threading
import time
import tty
from pathlib import Path
from string import Template

from gradsplit.launch.errors import LaunchError
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.rank_placement import RankPlacement

STREAMS = {1: "stdout.log", 2: "stderr.log"}
"""The file of each stream."""
_WATCHED_SILENCE_S, _SILENCE_S = 0.05, 1.0
"""How long a process must be silent in the middle of a line before that is shown, on a terminal (a progress bar has no
end) and elsewhere: ``print`` writes a line in pieces, and a busy machine may run other processes between them."""
_DRAIN_S = 1.0
"""How long what was written last may take to be read; what a process left in the background may still write."""
_TRACEBACK = "Traceback (most recent call last):"
_LINE_CHARACTERS = 500
_KEPT_BYTES = 1 << 15
"""How much of each process's standard error is kept for the report of a failure."""


def streams_of(text: str, local_rank: int) -> int:
    """Return the streams that torchrun's ``--redirects`` or ``--tee`` names: a sum of 1 (output) and 2 (error)."""
    try:
        pairs = dict(pair.split(":") for pair in text.split(",")) if ":" in text else {str(local_rank): text}
        streams = {int(rank): int(value) for rank, value in pairs.items()}
    except ValueError:
        streams = {local_rank: -1}
    if not all(0 <= value <= 3 for value in streams.values()):
        raise LaunchError(
            f"--redirects, --tee: got {text!r}; allowed: 0, 1, 2, 3, or those of local ranks: 0:1,1:3"
        )
    return streams.get(local_rank, 0)


class RankOutput:
    """The output of this node's processes in one run, on its way from `open_streams` to `finish`."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._child_ends: list[int] = []
        self._errors: dict[int, _Stream] = {}
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._shown_last: _Stream | None = None

    def open_streams(self, placement: RankPlacement, folder: Path) -> tuple[int, int]:
        """Return what a process shall have as standard output and error; files of them go to ``folder``."""
        return self._open(1, placement, folder), self._open(2, placement, folder)

    def _open(self, number: int, placement: RankPlacement, folder: Path) -> int:
        spec = self._spec
        teed = bool(streams_of(spec.teed, placement.local_rank) & number)
        redirected = bool(streams_of(spec.redirected, placement.local_rank) & number)
        shown = teed or not redirected
        shown &= spec.shown_local_ranks is None or placement.local_rank in spec.shown_local_ranks
        shown &= spec.shown_ranks is None or placement.rank in spec.shown_ranks
        file = folder / STREAMS[number] if teed or redirected or spec.log_folder is not None else None
        prefix = _prefix(spec, placement) if teed else b""
        stream = _Stream(number if shown else None, file, prefix, redraws=_is_first_shown(spec, placement))
        if teed and spec.filters[number - 1]:
            stream.duplicate(spec.filters[number - 1], folder.parent / f"filtered_{STREAMS[number]}")
        if number == 2:
            self._errors[placement.rank] = stream
        reader, writer = _terminal_like(number) if os.isatty(number) else os.pipe()
        self._selector.register(reader, selectors.EVENT_READ, stream)
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

    def last_words(self, rank: int, *, alone: bool) -> str:
        """Return what a rank wrote to standard error last: the traceback if there is one.

        It is empty where it stands last on the screen anyway, which this supervisor knows if it is ``alone``.
        """
        stream = self._errors[rank]
        return (
            ""
            if alone and stream is self._shown_last
            else _last_traceback(stream.kept.decode(errors="replace"))
        )

    def exceptions(self) -> list[tuple[int, str]]:
        """Return the ranks here that wrote a traceback, and how the last one ended."""
        kept = {rank: stream.kept.decode(errors="replace") for rank, stream in self._errors.items()}
        return [
            (rank, next(line for line in reversed(_lines(text)) if line)[:_LINE_CHARACTERS])
            for rank, text in kept.items()
            if _TRACEBACK in text
        ]

    def log_of(self, rank: int) -> str:
        """Return the file of a rank's standard error; the empty string without one."""
        return str(self._errors[rank].file or "")

    def _carry(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select(_WATCHED_SILENCE_S):
                try:
                    piece = os.read(key.fd, 65536)
                except OSError:  # How a terminal says that all its writers have gone.
                    piece = b""
                if key.data.add(piece):
                    self._shown_last = key.data
                if not piece:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            now_s = time.monotonic()
            for key in self._selector.get_map().values():
                key.data.show_unfinished(now_s)


class _Stream:
    """One stream of one process, and where it goes."""

    def __init__(self, screen: int | None, file: Path | None, prefix: bytes, *, redraws: bool) -> None:
        self._screen = screen
        self._redraws = redraws
        """Whether a line is shown again and again that the process writes over."""
        self.file = file
        self._log = None if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._prefix = prefix
        self._pending = b""
        self._silence_s = _WATCHED_SILENCE_S if screen is not None and os.isatty(screen) else _SILENCE_S
        self._heard_s = 0.0
        self._words: list[bytes] = []
        self._filtered = -1
        self.kept = b""

    def duplicate(self, words: tuple[str, ...], file: Path) -> None:
        """Write whole lines with one of ``words`` to ``file`` as well, which belongs to several ranks."""
        self._words = [word.encode() for word in words]
        self._filtered = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, piece: bytes) -> bool:
        """Take what has been read, nothing at the end; return whether something was shown."""
        self.kept = (self.kept + piece)[-_KEPT_BYTES:]
        if self._log is not None:
            _write_all(self._log, piece)
            if not piece:
                os.close(self._log)
        self._pending += piece
        self._heard_s = time.monotonic()
        if not self._redraws:
            self._pending = _without_overwritten(self._pending)
        ends = b"\n" if self._prefix or not self._redraws else b"\r\n"
        whole = max(self._pending.rfind(ends[i : i + 1]) for i in range(len(ends))) + 1 if piece else None
        return self._show(whole)

    def show_unfinished(self, now_s: float) -> None:
        drawing = not self._redraws and b"\r" in self._pending
        if not self._prefix and not drawing and now_s - self._heard_s > self._silence_s:
            self._show(None)

    def _show(self, size: int | None) -> bool:
        show, self._pending = self._pending[:size], b"" if size is None else self._pending[size:]
        if not show:
            return False
        lines = show.splitlines(keepends=True)
        if self._prefix:
            show = b"".join(self._prefix + line for line in lines)
        for line in lines:
            if any(word in line for word in self._words):
                _write_all(self._filtered, self._prefix + line)
        if self._screen is not None:
            _write_all(self._screen, show)
        return self._screen is not None


def _without_overwritten(text: bytes) -> bytes:
    """Return ``text`` without what each of its lines writes over, returning to its beginning."""
    lines = text.split(b"\n")
    return b"\n".join(line[max(line.rstrip(b"\r").rfind(b"\r"), 0) :] for line in lines)


def _is_first_shown(spec: LaunchSpec, placement: RankPlacement) -> bool:
    """Return whether this rank is the first of those whose output is shown."""
    if spec.shown_local_ranks is not None:
        return placement.node_index == 0 and placement.local_rank == min(spec.shown_local_ranks)
    return placement.rank == min(spec.shown_ranks or (0,))


def _write_all(file: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:  # Somebody else has set the terminal so.
            select.select([], [file], [])
        except OSError:  # Nobody reads, or the disk is full: the processes go on.
            return


def _prefix(spec: LaunchSpec, placement: RankPlacement) -> bytes:
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    if template is None:
        return f"[{placement.node_index}:{placement.rank}] ".encode()
    names = {"role_name": spec.role, "rank": placement.rank, "local_rank": placement.local_rank}
    return Template(template).safe_substitute(names).encode()


def _lines(text: str) -> list[str]:
    """Return the lines, without what torch puts before those of a traceback once there is a process group."""
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]


def _last_traceback(text: str) -> str:
    """Return the last traceback of ``text`` with those that led to it; without one the last lines."""
    lines = _lines(text)
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return "\n".join(lines[-20:])
    start = starts.pop()
    while starts and lines[start - 2].endswith(
        ("another exception occurred:", "cause of the following exception:")
    ):
        start = starts.pop()
    return "\n".join(lines[start:])


def _terminal_like(screen: int) -> tuple[int, int]:
    """Return both ends of a pseudo-terminal of the size of ``screen``, which changes nothing that is written."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    with contextlib.suppress(OSError):
        termios.tcsetwinsize(writer, termios.tcgetwinsize(screen))
    return reader, writer
