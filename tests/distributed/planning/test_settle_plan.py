"""The plan that is kept: buckets for a link that is slower beside a backward than alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsplit.bucketing.bucket import Parameter
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.bucketing.link_model import LinkModel
from gradsplit.bucketing.merge_plan import MergePlan, merge_plan
from gradsplit.bucketing.simulate import simulate
from gradsplit.distributed.planning.settle_plan import with_slack

# Segments of the backwards of BERT and GPT-2 as estimated: MiB and ms.
BACKWARDS = {
    "bert": (
        (2.4, 1.84),
        (9.0, 2.33),
        (81.1, 4.31),
        (178.0, 8.75),
        (91.0, 9.75),
        (42.8, 10.10),
        (13.5, 10.21),
    ),
    "gpt2": (
        (9.0, 2.83),
        (81.1, 4.71),
        (108.3, 8.62),
        (150.3, 9.38),
        (72.0, 9.95),
        (36.0, 10.23),
        (18.0, 10.39),
    ),
}
ALONE = LinkModel(10e-6, 1 / 285e9)


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_link_that_is_slower_than_alone_delays_little(name: str) -> None:
    segments = BACKWARDS[name]
    parameters = [
        Parameter(str(number), int(mib * 2**18), 4, "torch.float32", "cuda:0")
        for number, (mib, _) in enumerate(segments)
    ]
    ready_s = {str(number): 1e-3 * ready_ms for number, (_, ready_ms) in enumerate(segments)}
    alone = CostModel(ready_s, 1e-3 * segments[-1][1], ALONE)
    kept, without = with_slack(parameters, alone), merge_plan(parameters, alone)

    def exposed_ms(merged: MergePlan, share: float) -> float:
        return simulate(merged.plan, replace(alone, link=ALONE.at_speed(share))).exposed_ms

    # What it costs on the link as it was alone is less than what it saves on the one that is slower.
    saved_ms = exposed_ms(without, 0.75) - exposed_ms(kept, 0.75)
    assert saved_ms > 0.2
    assert exposed_ms(kept, 1.0) - exposed_ms(without, 1.0) < saved_ms / 1.5


def test_a_slower_link_takes_longer_for_each_byte_alone() -> None:
    slower = ALONE.at_speed(0.5)
    assert slower.startup_s == ALONE.startup_s
    assert slower.seconds_per_byte == 2 * ALONE.seconds_per_byte
    with pytest.raises(ZeroDivisionError):
        ALONE.at_speed(0)
