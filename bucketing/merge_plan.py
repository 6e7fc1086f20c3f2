"""Chooses buckets from measured costs, so that the last all-reduce ends as early as it can.

An all-reduce costs a start-up a and b a byte, and they run one after the other. Many buckets start early but pay a each
time; few start late. MG-WFBP (Shi, Chu and Li, INFOCOM 2019) merges greedily from the first gradient on. One can do
better: with f(j) the earliest end of reducing the first j gradients, ready at r and B(j) bytes together,

    f(j) = min over i < j of  max(f(i), r(j)) + a + b (B(j) - B(i)).

f grows with j. Where f(i) <= r(j), the last such i is best; among the others the least f(i) - b B(i), the minimum of a
window whose beginning only moves on. So the best plan takes one walk over the gradients. Of all plans that end as early
the one with the fewest buckets is taken: from the end, each bucket reaches back as far as its deadline lets it. Then,
from the front, each takes on what it can without delaying the others: what is reduced last is small, since nothing
hides it if the link is slower than expected.

Gradients of several dtypes or devices never share a bucket: each kind is planned as if the link were its own, and the
buckets start in the order in which they are ready. Contention is left to ``simulate``; it delays all plans alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradsplit.bucketing.bucket import BucketPlan, Parameter, format_bytes, pack_bucket
from gradsplit.bucketing.cost_model import CostModel

# Sums of the same times in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class MergePlan:
    """Buckets, with the reason for where each of them ends.

    Attributes:
        plan: in the order in which the all-reduces start.
        reasons: one a bucket.
    """

    plan: BucketPlan
    reasons: tuple[str, ...]


def merge_plan(
    parameters_in_ready_order: Sequence[Parameter], costs: CostModel, tolerance: float = 0.002
) -> MergePlan:
    """The buckets that reduce these gradients soonest.

    Args:
        parameters_in_ready_order: the gradients that are reduced.
        costs: when they are ready, and what the link takes.
        tolerance: by how much of the backward's length the last all-reduce may end later, for fewer buckets: times
            are measured, and each all-reduce costs the host something, too.

    Raises ValueError where a ready time is missing or earlier than that of a parameter before it.
    """
    kinds: dict[tuple[str, str], list[Parameter]] = {}
    for parameter in parameters_in_ready_order:
        if parameter.name not in costs.ready_s:
            raise ValueError(f"no ready time for {parameter.name}")
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    groups: list[tuple[float, list[Parameter], str]] = []
    for members in kinds.values():
        groups += _Kind(members, costs, tolerance).groups()
    groups.sort(key=lambda group: group[0])
    buckets = tuple(pack_bucket(index, tuple(members)) for index, (_, members, _) in enumerate(groups))
    plan = BucketPlan(tuple(parameters_in_ready_order), buckets)
    return MergePlan(plan, tuple(reason for _, _, reason in groups))


class _Kind:
    """The gradients that may share buckets; positions count them from 0."""

    def __init__(self, members: Sequence[Parameter], costs: CostModel, tolerance: float) -> None:
        self.members = members
        self.link = costs.link
        self.ready_s = [costs.ready_s[parameter.name] for parameter in members]
        for before, after in pairwise(members):
            if costs.ready_s[after.name] < costs.ready_s[before.name]:
                raise ValueError(f"{after.name!r} is ready before {before.name!r}, which stands before it")
        # Bytes of the first j gradients. Padding counts for nothing: it is less than 64 bytes a gradient.
        self.bytes = [0]
        for parameter in members:
            self.bytes.append(self.bytes[-1] + parameter.bytes)
        self.ends_s = self._earliest_ends()
        self.deadline_s = self.ends_s[-1] * (1 + _ROUNDING) + tolerance * costs.end_s

    def groups(self) -> list[tuple[float, list[Parameter], str]]:
        """For each bucket when it is ready, its members, and why it ends there."""
        bounds = self._with_small_tail(self._fewest_bounds())
        found = []
        free_s = 0.0
        for begin, end in pairwise(bounds):
            ready_s = self.ready_s[end - 1]
            reason = self._reason(begin, end, free_s)
            free_s = max(free_s, ready_s) + self._seconds(begin, end)
            found.append((ready_s, [*self.members[begin:end]], reason))
        return found

    def _seconds(self, begin: int, end: int) -> float:
        return self.link.seconds(self.bytes[end] - self.bytes[begin])

    def _earliest_ends(self) -> list[float]:
        """f of the module's docstring, for j = 0, 1, ..."""
        a, b = self.link.startup_s, self.link.seconds_per_byte
        ends_s = [0.0]
        # Candidates i with f(i) > r(j), their f(i) - b B(i) ascending.
        window: deque[int] = deque()
        rest_s: list[float] = [0.0]
        free = 0  # the last i with f(i) <= r(j)
        for j, ready_s in enumerate(self.ready_s, start=1):
            i = j - 1
            while window and rest_s[window[-1]] >= rest_s[i]:
                window.pop()
            window.append(i)
            while free + 1 < j and ends_s[free + 1] <= ready_s:
                free += 1
            while window and window[0] <= free:
                window.popleft()
            end_s = ready_s + a + b * (self.bytes[j] - self.bytes[free])
            if window:
                end_s = min(end_s, rest_s[window[0]] + a + b * self.bytes[j])
            ends_s.append(end_s)
            rest_s.append(end_s - b * self.bytes[j])
        return ends_s

    def _fewest_bounds(self) -> list[int]:
        """Where buckets begin, and the end of the last."""
        bounds = [len(self.members)]
        deadline_s = self.deadline_s
        while bounds[-1] > 0:
            end = bounds[-1]
            begin = end - 1
            for i in self._in_time(end, deadline_s):
                if self.ends_s[i] + self._seconds(i, end) <= deadline_s:
                    begin = i
                    break
            deadline_s -= self._seconds(begin, end)
            bounds.append(begin)
        return bounds[::-1]

    def _with_small_tail(self, bounds: list[int]) -> list[int]:
        """The same number of buckets, which hold as much as they can early without ending later."""
        bounds = [*bounds]
        deadlines_s = [self.deadline_s]
        for begin, end in reversed(list(pairwise(bounds))):
            deadlines_s.append(deadlines_s[-1] - self._seconds(begin, end))
        # By when each bucket must end.
        deadlines_s.reverse()
        free_s = 0.0
        for k in range(len(bounds) - 2):
            begin, end, following = bounds[k : k + 3]
            # What moves from the next bucket to this one does not change how long both take.
            both_s = self._seconds(begin, end) + self._seconds(end, following)
            start_s = deadlines_s[k + 2] * (1 + _ROUNDING) - both_s
            if free_s <= start_s:
                latest = bisect_right(self.ready_s, start_s, lo=end, hi=following - 1)
                bounds[k + 1] = max(end, latest)
            free_s = max(free_s, self.ready_s[bounds[k + 1] - 1]) + self._seconds(begin, bounds[k + 1])
        return bounds

    def _in_time(self, end: int, deadline_s: float) -> range:
        """Where a bucket may begin that starts when it is ready, and ends by the deadline."""
        low, high = 0, end - 1
        while low < high:
            middle = (low + high) // 2
            if self.ready_s[end - 1] + self._seconds(middle, end) <= deadline_s:
                high = middle
            else:
                low = middle + 1
        return range(low, end)

    def _reason(self, begin: int, end: int, free_s: float) -> str:
        size = format_bytes(self.bytes[end] - self.bytes[begin])
        first_s, last_s = self.ready_s[begin], self.ready_s[end - 1]
        if end == len(self.members):
            why = "the last: nothing hides it, so it holds only what is ready last"
        elif free_s > last_s:
            why = f"the link is busy until {1e3 * free_s:.2f} ms: what is ready by then travels together"
        else:
            why = (
                f"waits {1e3 * (last_s - max(first_s, free_s)):.2f} ms for its last gradient; "
                "the link has time for it before the end"
            )
        if end - begin == 1:
            return f"{size} alone; {why}"
        saved_ms = 1e3 * (end - begin - 1) * self.link.startup_s
        return f"{size} in {end - begin} gradients, which saves {saved_ms:.2f} ms of start-ups; {why}"
