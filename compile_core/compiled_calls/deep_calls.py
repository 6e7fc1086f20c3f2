"""Room on Python's stack: a capture, and the calls between graphs, take several frames for each of the program's.

A program that recurs 300 frames deep runs as plain Python, so it must run compiled. The limit is raised while a capture
or a deep recursion runs, and put back after; a recursion without end still meets it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# For a recursion to Python's own limit, with some seven frames for each.
_ROOM = 7000
# A recursion this deep is given room: calls of one code among as many frames.
_DEEP_CALLS, _LOOKED_AT = 8, 100

_lock = threading.Lock()
_users = 0
_raised = 0


@contextmanager
def deeper_stack() -> Iterator[None]:
    """In the ``with`` block, of whichever thread, there is room for more frames."""
    global _users, _raised
    with _lock:
        _users += 1
        if _users == 1:
            _raised = sys.getrecursionlimit() + _ROOM
            sys.setrecursionlimit(_raised)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and sys.getrecursionlimit() == _raised:  # else the program has set its own
                sys.setrecursionlimit(_raised - _ROOM)


def with_room(call: Callable[..., Any], code: types.CodeType) -> Callable[..., Any]:
    """``call``, or what calls it with more room where frames of ``code`` already lie upon one another."""
    if _users:
        return call
    frame, count = sys._getframe(1), 0
    for _ in range(_LOOKED_AT):
        count += frame.f_code is code
        if frame.f_back is None:
            return call
        frame = frame.f_back
    return _Roomy(call) if count >= _DEEP_CALLS else call


class _Roomy:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with deeper_stack():
            return self._call(*args, **kwargs)
