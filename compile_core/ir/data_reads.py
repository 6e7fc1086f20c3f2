"""Where numbers and sizes that depend on data stay in a graph though nobody asked for it.

They do until the program needs the value of one, or a stage has no rule: what is captured then ends the graph where
the data were read, as it does at a branch by data. So a frame is one graph, or as many as without. The places are
remembered for all that is compiled in the same way, and each graph is guarded by those that it has: where one of them
comes to end graphs, the graph is captured anew.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field

# A line of a program's code.
Place = tuple[types.CodeType, int]


@dataclass
class DataEnds:
    """Where data that the program reads end graphs, of all that is compiled in the same way.

    Attributes:
        changes_last: what a graph with such data changes of what it was given, it changes when all else is computed. So
            a check that fails, wherever it is, leaves that as it was.
        unasked: data may be read where the settings do not say so.
        at_backwards: graphs end at backwards, too. Steps of optimizers count on the CPU as a rule, which no CUDA graph
            does; forward and backward are to have theirs.
        places: those found so far.
    """

    changes_last: bool
    unasked: bool = True
    at_backwards: bool = False
    places: set[Place] = field(default_factory=set)


class DataReads:
    """The places where one capture read data; it is true where there are any.

    Args:
        ends: where that ends graphs, which ``end_graphs`` adds to; None to read none without being asked.
        may_end: graphs may end; else a decision by data is an error, and its outcome is not guessed.
    """

    def __init__(self, ends: DataEnds | None, may_end: bool = True) -> None:
        self._ends = ends or DataEnds(changes_last=False, unasked=False)
        self.may_end = may_end
        self._found: dict[Place, None] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def changes_last(self) -> bool:
        """Whether the graph, which has read data, changes what it was given last; see ``DataEnds``."""
        return self._ends.changes_last and bool(self._found)

    @property
    def ends_at_backwards(self) -> bool:
        return self._ends.at_backwards and self.may_end

    def may_stay(self, place: Place) -> bool:
        """Whether what is read here may stay in the graph, which then has it."""
        stays = self._ends.unasked and place not in self._ends.places
        if stays:
            self._found[place] = None
        return stays

    def end_graphs(self) -> None:
        """Ends graphs at all places of this capture from now on."""
        self._ends.places.update(self._found)
        self._found.clear()

    def guard(self) -> tuple[str, list[object], str]:
        """Condition, constants and text of the guard that none of the places ends graphs."""
        ended = "no value that data decide was needed where this graph but computes with it"
        return "{c0}.isdisjoint({c1})", [self._ends.places, tuple(self._found)], ended
