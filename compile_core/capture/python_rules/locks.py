"""Locks of ``threading`` that were there before.

Where the program waits for one the graph ends: what follows is guarded, computed and stored while the lock is held,
which is let go of after that.
"""

from __future__ import annotations

import threading
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import MethodOwner
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import Source

LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _is_held(lock: Any) -> bool:
    return lock._is_owned() if hasattr(lock, "_is_owned") else lock.locked()


class LockValue(MethodOwner, ReferenceValue):
    """A lock. Letting go of it is an effect like others, the last."""

    source: Source

    def do_acquire(self, state: CaptureState, *args: Value, **kwargs: Value) -> Value:
        raise state.unsupported("lock", f"{self.describe()} is waited for, or let go of by who has it not")

    def do_release(self, state: CaptureState, *raised: Value) -> None:
        if not _is_held(self.real) or any(self in given for _, given in state.effects.messages):
            self.do_acquire(state)
        state.guards.add([self.source], "{c0}({0})", [_is_held], f"{self.source} is held")
        state.effects.message_given(type(self.real).release, [self])

    do___enter__, do___exit__ = do_acquire, do_release
