"""The time during which compiled entries are used and no new ones are made, of the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    active = False


_state = _State()


@contextmanager
def run_only() -> Iterator[None]:
    """In the ``with`` block, calls that fit no compiled entry run as plain Python."""
    before, _state.active = _state.active, True
    try:
        yield
    finally:
        _state.active = before


def is_run_only() -> bool:
    return _state.active
