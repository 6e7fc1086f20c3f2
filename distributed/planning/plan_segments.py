"""Where a backward is cut into regions, and in which order its work runs.

A gradient is on its way as soon as the region that stores it has run, so a cut lets all-reduces start earlier; but it
costs the host a call, and kernels what they had fused across it. The cuts do not depend on the buckets, which are
planned while the program runs, nor is the link known when the backward is compiled. So times are estimated, and what is
taken is good for a fast link, where only what is ready last is seen, as well as for a slow one, which must start early
and never wait: `bucketing.merge_plan` says for each link where it wants cuts, and of these those stay that are worth
more than they cost, by the sum over the links of the backward's length over the shortest possible one.

The order is chosen the same way: as autograd has it, or with more and more of the last weight gradients postponed
after the gradients that are ready last (`order_backward`), as far as no more memory is alive than at the peak.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import GraphModule, Node

from gradsplit.bucketing.bucket import Parameter
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.bucketing.link_model import LinkModel
from gradsplit.bucketing.merge_plan import merge_plan
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.distributed.planning.backward_costs import CPU_RATES, GPU_RATES, OrderCosts, Rates, node_facts
from gradsplit.distributed.planning.cut_backward import Segment
from gradsplit.distributed.planning.order_backward import (
    may_be_ordered,
    postponable,
    settled_order,
    with_postponed,
)


@dataclass(frozen=True)
class Machine:
    """What a backward is planned for.

    Attributes:
        rates: how fast it computes.
        links: all-reduces as they may be.
        cut_s: what the host and lost fusions take for each region more.
    """

    rates: Rates
    links: tuple[LinkModel, ...]
    cut_s: float


# NVLink between two H200s beside a backward, where it is slower than alone (``settle_plan``), and sockets. What lies
# between could use more cuts than are worth their price to these.
GPU = Machine(GPU_RATES, (LinkModel(10e-6, 1 / 200e9), LinkModel(100e-6, 1 / 5e9)), 30e-6)
# Processes of one machine, and sockets.
CPU = Machine(CPU_RATES, (LinkModel(100e-6, 1 / 4e9), LinkModel(200e-6, 1 / 1e9)), 50e-6)
# An order is left for one that shortens the steps by this much, added up over the links.
_LEAST_GAIN = 0.002
# Nothing better is sought after an order that is so much worse.
_FAR = 0.05
# Places where a cut could be lie this share of the backward apart.
_LEAST_SHARE = 0.005


def plan_segments(
    module: GraphModule, gradients: Mapping[str, int], machine: Machine | None = None
) -> tuple[Segment, ...]:
    """The backward's segments in the order in which they run.

    Args:
        module: the backward graph, with fake values.
        gradients: for each parameter whose gradient is stored in a bucket, the position of it among the results.
        machine: by default, one with such devices as the gradients are on.

    Returns:
        Segments that together hold every node that computes once, each after what it reads; all but the last complete
        a gradient.
    """
    results = graph_results(module)
    stored = {name: node for name, position in gradients.items() if (node := results[position]) is not None}
    into_buckets = set(gradients.values())
    returned = [
        node for position, node in enumerate(results) if node is not None and position not in into_buckets
    ]
    if machine is None:
        machine = CPU if all(node.meta["val"].device.type == "cpu" for node in stored.values()) else GPU
    facts = node_facts(module.graph.nodes, machine.rates)

    def costs_of(order: Sequence[Node]) -> OrderCosts:
        return OrderCosts(order, facts, stored.values(), returned)

    order: Sequence[Node] = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    costs = costs_of(order)
    work: dict[str, list[Node]] = {}
    limit = max(costs.live_bytes(), default=0)
    if may_be_ordered(order):
        settled = costs_of(settled_order(order, {*stored.values(), *returned}))
        if max(settled.live_bytes(), default=0) <= limit:
            order, costs = settled.order, settled
        work = postponable(order, stored)
    best = _Cuts(costs, stored, machine)
    best.refine()
    for count in _counts(len(work)):
        # The smallest last: nothing hides its all-reduce.
        last = sorted([*work][-count:], key=lambda name: -facts[stored[name]].bytes)
        costs = costs_of(with_postponed(order, [work[name] for name in last]))
        if max(costs.live_bytes()) > limit:
            break
        candidate = _Cuts(costs, stored, machine)
        if candidate.score > best.score + _FAR:
            break
        candidate.refine()
        if candidate.score < best.score - _LEAST_GAIN:
            best = candidate
    return best.segments()


def _counts(most: int) -> list[int]:
    """How many gradients to postpone: more are tried at ever larger steps."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found if most else []


class _Cuts:
    """An order and the best cuts of it.

    Attributes:
        score: the steps' lengths over the least possible ones, added up over the links.
    """

    def __init__(self, costs: OrderCosts, stored: Mapping[str, Node], machine: Machine) -> None:
        self.machine = machine
        self.order = costs.order
        self.facts = costs.facts
        # One that is a saved value is ready at once.
        places = {name: costs.position.get(node, -1) + 1 for name, node in stored.items()}
        self.ready = sorted(stored, key=places.__getitem__)
        self.ready_at = [places[name] for name in self.ready]
        self.done_s = [0.0, *accumulate(costs.seconds(machine.rates))]
        self.split_s = [size / machine.rates.bytes_per_s for size in costs.split_bytes()]
        sizes = [0, *accumulate(self.facts[stored[name]].bytes for name in self.ready)]
        # For each place of a cut, the number of gradients and the bytes that are ready there.
        self.ends = self._thinned(sorted({self._cut_behind(place) for place in self.ready_at}))
        self.count = {end: bisect_right(self.ready_at, end) for end in self.ends}
        self.bytes = {end: sizes[self.count[end]] for end in self.ends}
        self.cuts, self.score = self._choose()

    def _cut_behind(self, place: int) -> int:
        """The place at or after one where a cut splits least, before the next gradient is ready or a call runs."""
        following = bisect_right(self.ready_at, place)
        last = self.ready_at[following] - 1 if following < len(self.ready) else len(self.order)
        best = place
        for end in range(place + 1, last + 1):
            if self.facts[self.order[end - 1]].kind == "call":
                break
            if self.split_s[end] < self.split_s[best]:
                best = end
        return best

    def _thinned(self, ends: Sequence[int]) -> list[int]:
        """The places without those that have another one right after them."""
        found: list[int] = []
        for end in reversed(ends):
            if not found or self.done_s[found[-1]] - self.done_s[end] >= _LEAST_SHARE * self.done_s[-1]:
                found.append(end)
        return found[::-1]

    def _choose(self) -> tuple[list[int], float]:
        """The best of the cuts that links want, and how good they are."""
        whole = len(self.order)
        cuts = sorted(
            {cut for link in self.machine.links for cut in self._wanted_by(link) if 0 < cut < whole}
        )
        score = self._score(cuts)
        while cuts:
            fewer, least = self._best([[cut for cut in cuts if cut != removed] for removed in cuts])
            if least > score:
                break
            cuts, score = fewer, least
        return cuts, score

    def refine(self) -> None:
        """Moves and adds single cuts as long as that is better."""
        places = [end for end in self.ends if 0 < end < len(self.order)]
        better = True
        while better and places:
            tried = [sorted({*self.cuts, end}) for end in places]
            for number, cut in enumerate(self.cuts):
                place = places.index(cut)
                beside = {*places[max(place - 1, 0) : place + 2]} - {*self.cuts}
                tried += [[*self.cuts[:number], end, *self.cuts[number + 1 :]] for end in beside]
            cuts, score = self._best(tried)
            better = score < self.score
            if better:
                self.cuts, self.score = cuts, score

    def _best(self, tried: Sequence[list[int]]) -> tuple[list[int], float]:
        scores = [self._score(cuts) for cuts in tried]
        least = min(scores, default=math.inf)
        return (tried[scores.index(least)] if tried else []), least

    def _wanted_by(self, link: LinkModel) -> list[int]:
        """Where gradients should be cut for a link, were cuts free."""
        parameters = [
            Parameter(str(end), self.bytes[end] - before, 1, "", "")
            for before, end in zip([0, *(self.bytes[end] for end in self.ends)], self.ends, strict=False)
        ]
        ready_s = {str(end): self.done_s[end] for end in self.ends}
        merged = merge_plan(parameters, CostModel(ready_s, self.done_s[-1], link))
        return [int(bucket.parameters[-1].name) for bucket in merged.plan.buckets]

    def _score(self, cuts: Sequence[int]) -> float:
        """See ``score``."""
        whole = len(self.order)
        total_bytes = max(self.bytes.values(), default=0)
        score = 0.0
        for link in self.machine.links:
            extra_s = end_s = 0.0
            sent = 0
            for cut in (*cuts, whole):
                ready = total_bytes if cut == whole else self.bytes[cut]
                if ready > sent:
                    end_s = max(end_s, self.done_s[cut] + extra_s) + link.seconds(ready - sent)
                    sent = ready
                extra_s += self.machine.cut_s + self.split_s[cut]
            computing_s = (
                self.done_s[-1] + len(cuts) * self.machine.cut_s + sum(self.split_s[cut] for cut in cuts)
            )
            least_s = max(self.done_s[-1], link.seconds(total_bytes))
            score += max(end_s, computing_s) / least_s if least_s else 1.0
        return score

    def segments(self) -> tuple[Segment, ...]:
        """The order in parts."""
        found = []
        begin = sent = 0
        for cut in (*self.cuts, len(self.order)):
            ready = len(self.ready) if cut == len(self.order) else self.count[cut]
            found.append(Segment(tuple(self.order[begin:cut]), tuple(self.ready[sent:ready])))
            begin, sent = cut, ready
        return tuple(found)
