"""A compilation draws none of the program's random numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Python's random numbers go on where they were: modules that a compilation imports may draw some."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
