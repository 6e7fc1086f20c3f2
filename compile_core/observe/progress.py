"""A line about a long compilation, for a person who waits: on a terminal, from rank 0; logs have nothing of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradsplit.compile_core.observe.stage_times import running_stages
from gradsplit.compile_core.options import rank_given

# Shorter compilations show nothing.
_DELAY_S = 2.0
_REFRESH_S = 0.2

_is_shown = threading.Lock()


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows what is compiled, for how long, and which stage runs, while the ``with`` block does."""
    if not sys.stderr.isatty() or rank_given() or not _is_shown.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(what, ended), name="gradsplit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _is_shown.release()


def _show(what: str, ended: threading.Event) -> None:
    began = time.perf_counter()
    if ended.wait(_DELAY_S):
        return
    # Only now, since few processes have a terminal. It draws random numbers, which whoever compiles takes back.
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots")
    console = Console(stderr=True)
    with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        while not ended.wait(_REFRESH_S):
            stages = " > ".join(running_stages())
            spinner.update(text=f"gradsplit compiles {what}: {stages} ({time.perf_counter() - began:.0f} s)")
