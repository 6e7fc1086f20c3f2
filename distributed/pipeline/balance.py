"""Where to cut: contiguous parts of which the greatest is as small as can be.

The classic linear partition, by dynamic programming over the positions at which the graph can be cut: the best greatest
part of the first ``k`` pieces in ``n`` parts is the least, over the last cut, of the greater of the last part and the
best of what is before it. A part also pays for what it sends on, so of cuts that are about as good the narrow one wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy


def cut_evenly(
    costs: Sequence[float], cuts: Sequence[int], parts: int, sent: Sequence[float]
) -> tuple[int, ...]:
    """The positions, among ``cuts``, that make ``parts`` parts with the least greatest cost.

    Args:
        costs: of the pieces; a cut at ``k`` is before piece ``k``.
        sent: by position, what a cut there adds to the cost of the part before it.
    """
    places = [0, *cuts, len(costs)]
    before = numpy.concatenate([[0.0], numpy.cumsum(costs)])[places]
    sends = numpy.array([0.0, *(sent[position] for position in cuts), 0.0])
    count = len(places)
    # best[j]: of the pieces before places[j], in the number of parts so far; ties go to less that is sent.
    best = before + sends
    chosen = numpy.zeros((parts, count), dtype=int)
    for part in range(1, parts):
        now = numpy.full(count, numpy.inf)
        for end in range(part + 1, count):
            greatest = numpy.maximum(best[part:end], before[end] - before[part:end] + sends[end])
            last = int(numpy.argmin(greatest))
            now[end], chosen[part, end] = greatest[last], part + last
        best = now
    found = []
    end = count - 1
    for part in range(parts - 1, 0, -1):
        end = int(chosen[part, end])
        found.append(places[end])
    return tuple(reversed(found))
