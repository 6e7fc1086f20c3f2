"""Where to cut: contiguous parts of which the greatest is about as small as can be, and which send little.

The classic linear partition, by dynamic programming over the positions at which the graph can be cut, twice: the least
greatest part, over the last cut, is the greater of the last part and the best of what is before it; then, of all cuts
whose greatest part is hardly greater, those that send the least in all. Else a cut would fall between the two ends of a
residual connection as often as beside them, and send both, to save a hundredth of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

# How much greater than need be a part may be, so that less is sent.
_SLACK = 1.03


def cut_evenly(
    costs: Sequence[float], cuts: Sequence[int], parts: int, sent: Sequence[float]
) -> tuple[int, ...]:
    """The positions, among ``cuts``, that make ``parts`` parts whose greatest costs at most 3 % more than it must.

    Args:
        costs: of the pieces; a cut at ``k`` is before piece ``k``.
        sent: by position, what a cut there adds to the cost of the part before it.
    """
    places = [0, *cuts, len(costs)]
    before = numpy.concatenate([[0.0], numpy.cumsum(costs)])[places]
    sends = numpy.array([0.0, *(sent[position] for position in cuts), 0.0])

    def part(first: int, end: int) -> numpy.ndarray:
        """What the parts that end at ``end`` cost, by where they begin, from ``first`` on."""
        return before[end] - before[first:end] + sends[end]

    _, greatest = _best_cuts(
        parts, len(places), lambda best, first, end: numpy.maximum(best, part(first, end))
    )
    limit = _SLACK * greatest
    found, _ = _best_cuts(
        parts,
        len(places),
        lambda best, first, end: numpy.where(part(first, end) <= limit, best + sends[end], numpy.inf),
    )
    return tuple(places[end] for end in found)


def _best_cuts(
    parts: int, count: int, extend: Callable[[numpy.ndarray, int, int], numpy.ndarray]
) -> tuple[list[int], float]:
    """The places to cut at, and what that costs.

    Args:
        count: of places, both ends among them.
        extend: what all costs with one more part, which ends at a place, by where that part begins, from a place on;
            given what is before costs.
    """
    chosen = numpy.zeros((parts, count), dtype=int)
    best = numpy.array([0.0] + [numpy.inf] * (count - 1))
    for part in range(parts):
        now = numpy.full(count, numpy.inf)
        for end in range(part + 1, count):
            costs = extend(best[part:end], part, end)
            first = int(numpy.argmin(costs))
            now[end], chosen[part, end] = costs[first], part + first
        best = now
    found = []
    end = count - 1
    for part in range(parts - 1, 0, -1):
        end = int(chosen[part, end])
        found.append(end)
    return found[::-1], float(best[-1])
