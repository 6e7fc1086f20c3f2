"""Inputs of a program whose values may still be on their way when it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LateInputs:
    """
    Attributes:
        positions: which inputs; no other input shares memory with them.
        await_values: has whatever comes next wait until the values are there; does nothing if they are.
    """

    positions: frozenset[int]
    await_values: Callable[[], None]
