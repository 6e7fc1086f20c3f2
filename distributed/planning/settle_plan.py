"""From the first bucket plan to the one that is kept: backwards are measured, and all ranks take what rank 0 plans.

The first plan is stock DDP's, as rank 0 has it. Its first rounds are not measured, since libraries choose their kernels
there; in the next ones times are taken (see ``measure_costs``), and before the forward that follows the plan is chosen.
All ranks have ended as many rounds by then, so these collectives meet. Nothing is compiled again.

The link is measured alone, and shares memories with the backward later: two H200s then sent 240 GB/s instead of 285. A
plan that the measured link would just end with has no slack for that, and each bucket adds to the delay of the next. So
plans are made for a slower link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from gradsplit.bucketing.bucket import BucketPlan, Parameter
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.bucketing.merge_plan import MergePlan, merge_plan
from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.distributed.collectives.measure_costs import ReadyTimes, agreed_costs
from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.gradients.ddp_communicator import DDPCommunicator

Plan = TypeVar("Plan", BucketPlan, MergePlan)

_FIRST_MEASURED = 2
_ROUNDS = 3
# Of the link's speed, what is counted on beside a backward.
_SHARE_OF_SPEED = 0.75


class PlanSettler:
    """Chooses the plan that is kept.

    Attributes:
        costs: what was measured, as all ranks agreed; ``None`` before.
        chosen: the plan in use, with reasons; ``None`` before.
    """

    def __init__(self, communicator: DDPCommunicator) -> None:
        self._communicator = communicator
        self._times: ReadyTimes | None = None
        self._last_measured = 0
        self.costs: CostModel | None = None
        self.chosen: MergePlan | None = None

    def begin_forward(self) -> None:
        """Called before each synchronised forward, on all ranks."""
        buckets, rounds = self._communicator.buckets, self._communicator.rounds
        if self.chosen is not None or buckets.plan is None:
            return
        if self._times is None and rounds >= _FIRST_MEASURED:
            self._times = buckets.ready_times = ReadyTimes(buckets.device)
            # Several backwards of one forward are several rounds, so more than the first may have passed.
            self._last_measured = rounds + _ROUNDS
        elif self._times is not None and rounds >= self._last_measured:
            buckets.ready_times = None
            self.costs, self.chosen = _choose(buckets, self._times)
            plan = self.chosen.plan
            log_artifact("ddp_graphs", lambda: f"the plan chosen from measured costs:\n{plan}")
            self._communicator.adopt(plan)


def with_slack(parameters_in_ready_order: Sequence[Parameter], costs: CostModel) -> MergePlan:
    """The buckets that reduce these gradients soonest if the link is somewhat slower than it was alone."""
    return merge_plan(parameters_in_ready_order, replace(costs, link=costs.link.at_speed(_SHARE_OF_SPEED)))


def _choose(buckets: Buckets, times: ReadyTimes) -> tuple[CostModel, MergePlan]:
    plan, device = buckets.plan, buckets.device
    assert plan is not None
    # All ranks name them in one order, whatever order their modules have.
    names = sorted(buckets.parameters)
    costs = agreed_costs(names, times, buckets.averaging, buckets.group, device, plan.bytes)
    chosen = None
    if buckets.group.rank() == 0:
        order = sorted(plan.parameters, key=lambda parameter: costs.ready_s[parameter.name])
        chosen = with_slack(order, costs)
    return costs, of_first_rank(chosen, buckets)


def of_first_rank(mine: Plan | None, buckets: Buckets) -> Plan:
    """What the first rank has planned; all ranks of the group call this."""
    plans = [mine]
    dist.broadcast_object_list(plans, group=buckets.group, group_src=0, device=buckets.device)
    assert plans[0] is not None
    return plans[0]
