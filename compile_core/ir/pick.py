"""Taking the values at given places out of many: in one call of C, since a deep network has thousands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(places: Iterable[int]) -> Pick:
    """What takes the values at these places."""
    places = tuple(places)
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])
