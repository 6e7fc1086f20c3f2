import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsplit.bucketing import CostModel, LinkModel, Parameter, merge_plan, simulate

# Whole numbers of 64-byte units, so that no padding blurs the comparison.
UNIT = 16


def parameters_of(sizes, dtype="torch.float32"):
    return [Parameter(f"p{k}", size * UNIT, 4, dtype, "cuda") for k, size in enumerate(sizes)]


def end_of(bounds, ready, sizes, link):
    free = 0.0
    for begin, end in itertools.pairwise(bounds):
        free = max(free, ready[end - 1]) + link.seconds(64 * sum(sizes[begin:end]))
    return free


def all_bounds(count):
    for cuts in itertools.product((False, True), repeat=count - 1):
        yield [0, *(k + 1 for k, cut in enumerate(cuts) if cut), count]


backwards = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=300)
@given(backwards, st.integers(0, 5), st.sampled_from([0, 1 / 64, 1 / 16]))
def test_no_plan_ends_earlier_and_none_that_ends_as_early_has_fewer_buckets(steps, startup, per_byte):
    sizes = [size for size, _ in steps]
    ready = list(itertools.accumulate(float(wait) for _, wait in steps))
    link = LinkModel(float(startup), per_byte)
    parameters = parameters_of(sizes)
    costs = CostModel({p.name: r for p, r in zip(parameters, ready, strict=True)}, ready[-1], link)
    merged = merge_plan(parameters, costs, tolerance=0.0)
    found = [len(bucket.parameters) for bucket in merged.plan.buckets]
    end = end_of([0, *itertools.accumulate(found)], ready, sizes, link)
    best = min((end_of(bounds, ready, sizes, link), len(bounds) - 1) for bounds in all_bounds(len(sizes)))
    assert end == pytest.approx(best[0])
    assert len(found) == best[1]
    assert len(merged.reasons) == len(found)
    assert simulate(merged.plan, costs).end_s == pytest.approx(end)


def test_a_fast_link_leaves_a_small_tail_and_a_slow_start_takes_all_at_once():
    parameters = parameters_of([4, 4, 4, 4])
    ready = {p.name: 1.0 + k for k, p in enumerate(parameters)}
    fast = merge_plan(parameters, CostModel(ready, 4.0, LinkModel(0.0, 1 / 1024)), tolerance=0.0)
    # The tail is as small as can be, and what is hidden anyway takes one start.
    assert [len(bucket.parameters) for bucket in fast.plan.buckets] == [3, 1]
    slow = merge_plan(parameters, CostModel(ready, 4.0, LinkModel(100.0, 0.0)), tolerance=0.0)
    assert len(slow.plan.buckets) == 1
    assert "nothing hides it" in slow.reasons[0]


def test_a_busy_link_collects_what_is_ready_meanwhile():
    parameters = parameters_of([10, 5, 5, 10])
    ready = dict(zip((p.name for p in parameters), (0.1, 0.2, 0.3, 1.4), strict=True))
    merged = merge_plan(parameters, CostModel(ready, 1.4, LinkModel(0.01, 1 / 640)), tolerance=0.0)
    assert [len(bucket.parameters) for bucket in merged.plan.buckets] == [1, 2, 1]
    assert "640 B alone" in merged.reasons[0]
    assert "saves 10.00 ms of start-ups; the link is busy until 1110.00 ms" in merged.reasons[1]
    assert "nothing hides it" in merged.reasons[2]


def test_gradients_move_to_the_bucket_before_while_that_is_in_time():
    parameters = parameters_of([10] * 6)
    ready = {p.name: 0.1 * k for k, p in enumerate(parameters)}
    merged = merge_plan(parameters, CostModel(ready, 0.5, LinkModel(0.05, 1 / 64000)), tolerance=0.0)
    counts = [len(bucket.parameters) for bucket in merged.plan.buckets]
    assert counts[-1] == 1 and sum(counts) == 6


def test_a_tolerance_saves_buckets():
    parameters = parameters_of([1] * 50)
    ready = {p.name: float(k) for k, p in enumerate(parameters)}
    costs = CostModel(ready, 49.0, LinkModel(0.001, 1 / 640))
    exact, near = (merge_plan(parameters, costs, tolerance=t) for t in (0.0, 0.05))
    assert len(near.plan.buckets) <= len(exact.plan.buckets)
    ends = [simulate(merged.plan, costs).end_s for merged in (exact, near)]
    assert ends[0] <= ends[1] <= ends[0] + 0.05 * 49.0


def test_kinds_are_kept_apart():
    narrow = [Parameter(f"n{k}", UNIT, 2, "torch.bfloat16", "cuda") for k in range(3)]
    wide = [Parameter(f"w{k}", UNIT, 4, "torch.float32", "cuda") for k in range(3)]
    mixed = [p for pair in zip(narrow, wide, strict=True) for p in pair]
    costs = CostModel({p.name: float(k) for k, p in enumerate(mixed)}, 6.0, LinkModel(1.0, 0.0))
    merged = merge_plan(mixed, costs)
    assert {(bucket.dtype, len(bucket.parameters)) for bucket in merged.plan.buckets} <= {
        (dtype, count) for dtype in ("torch.bfloat16", "torch.float32") for count in (1, 2, 3)
    }
    ready = [max(costs.ready_s[p.name] for p in bucket.parameters) for bucket in merged.plan.buckets]
    assert ready == sorted(ready)


def test_bad_ready_times_are_told():
    parameters = parameters_of([1, 1])
    link = LinkModel(0.0, 0.0)
    with pytest.raises(ValueError, match="no ready time for p1"):
        merge_plan(parameters, CostModel({"p0": 0.0}, 1.0, link))
    with pytest.raises(ValueError, match="'p1' is ready before 'p0'"):
        merge_plan(parameters, CostModel({"p0": 0.5, "p1": 0.1}, 1.0, link))


def test_ten_thousand_parameters_for_a_thousand_ranks_take_under_a_second():
    draw = random.Random(0)
    parameters = [
        Parameter(f"p{k}", draw.choice([1024, 4096, 1 << 20, 1 << 22]), 2, "torch.bfloat16", "cuda")
        for k in range(10_000)
    ]
    ready = dict(
        zip((p.name for p in parameters), sorted(draw.uniform(0, 3) for _ in parameters), strict=True)
    )
    # InfiniBand at 400 Gbit/s.
    costs = CostModel(ready, 3.0, LinkModel.ring(1000, 5e-6, 1 / 50e9))
    begin = time.process_time()
    merged = merge_plan(parameters, costs)
    timeline = simulate(merged.plan, costs)
    assert time.process_time() - begin < 1
    assert timeline.exposed_ms < timeline.all_reduce_ms
    one = [p for bucket in merged.plan.buckets for p in bucket.parameters]
    assert one == parameters
