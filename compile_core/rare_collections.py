"""While something is compiled, Python looks for cyclic garbage rarely.

A compilation makes many objects that stay until it ends, which each search would visit anew, beside all those of the
program: a sixth of the time, and nearly nothing is found. The same goes for what makes many objects in a step.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# New objects until a search; of those searches until one among older objects, too; and the oldest.
_RARELY = (100_000, 50, 1000)
_lock = threading.Lock()
_inside = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, also in other threads, the thresholds of ``gc`` are high; at the end they are the program's again.

    Where a program has switched the search off, or set thresholds meanwhile, it is left so.
    """
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < _RARELY[0]:
                gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold() == _RARELY:
                gc.set_threshold(*_before)
