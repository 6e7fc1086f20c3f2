"""The interface of those who observe a compiled function and all that continues it or that it calls."""

from __future__ import annotations

import types

from gradsplit.compile_core.ir.captured import CapturedFrame


class Observer:
    """Does nothing; what a subclass wants to hear of, it overrides."""

    def frame_captured(self, name: str, code: types.CodeType, frame: CapturedFrame) -> None:
        """A call of the function ``name`` was captured, to its end or to a graph break."""

    def frame_missed(self, name: str, code: types.CodeType, reason: str) -> None:
        """The function has entries and none fits a call; ``reason`` is the first guard that does not hold."""
