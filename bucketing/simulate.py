"""Predicts a backward under a bucket plan: when each segment computes and each all-reduce runs.

All-reduces run one after the other, in the plan's order, each when its bucket is ready and the one before it is done;
computing goes on meanwhile, slower by the model's contention. Nothing runs before the host has queued it, and starting
an all-reduce keeps the host from queueing what comes next.
"""

from __future__ import annotations

from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.bucketing.timeline import Interval, Timeline


def simulate(plan: BucketPlan, costs: CostModel) -> Timeline:
    """The predicted timeline, in seconds since the backward began: one compute segment up to each bucket's last
    gradient, one for what remains, and one all-reduce a bucket. Its ``exposed_ms`` is the predicted exposure.

    Raises ValueError for a parameter without a ready time.
    """
    ready = []
    for bucket in plan.buckets:
        missing = [parameter.name for parameter in bucket.parameters if parameter.name not in costs.ready_s]
        if missing:
            raise ValueError(f"no ready time for {', '.join(missing)}")
        ready.append(max(costs.ready_s[parameter.name] for parameter in bucket.parameters))
    compute = _Compute(1 - costs.contention)
    host = costs.host
    intervals = []
    link_free_s = 0.0
    for started, (bucket, ready_s) in enumerate(zip(plan.buckets, ready, strict=True)):
        began_s = compute.now_s
        names = [parameter.name for parameter in bucket.parameters]
        if compute.advance_to(ready_s, host.queued(names, started), link_free_s):
            intervals.append(Interval("compute", f"segment {bucket.index}", began_s, compute.now_s))
        start_s = max(compute.now_s, link_free_s, host.queued(names, started + 1))
        link_free_s = start_s + costs.link.seconds(bucket.bytes)
        intervals.append(Interval("all_reduce", f"bucket {bucket.index}", start_s, link_free_s, bucket.bytes))
    began_s = compute.now_s
    if compute.advance_to(costs.end_s, host.ended(len(plan.buckets)), link_free_s):
        intervals.append(Interval("compute", "rest", began_s, compute.now_s))
    return Timeline(tuple(intervals))


class _Compute:
    """The compute stream: ``done_s`` seconds of work done at ``now_s``.

    An all-reduce that waits for the link starts before the next bucket is ready or right after the one before it, so
    the link is busy from now on until ``link_free_s`` and idle after that.
    """

    def __init__(self, slowed: float) -> None:
        self.now_s = self.done_s = 0.0
        self._slowed = slowed

    def advance_to(self, work_s: float, queued_s: float, link_free_s: float) -> bool:
        """Computes until ``work_s`` seconds of work are done, the last of which the host queues at ``queued_s``;
        whether there was anything to do."""
        left_s = work_s - self.done_s
        if left_s <= 0:
            return False
        busy_s = max(link_free_s - self.now_s, 0.0)
        while_busy_s = min(left_s, busy_s * self._slowed)
        self.now_s += while_busy_s / self._slowed + (left_s - while_busy_s)
        self.now_s = max(self.now_s, queued_s)
        self.done_s = work_s
        return True
