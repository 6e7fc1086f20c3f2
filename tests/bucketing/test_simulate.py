import pytest

from gradsplit.bucketing import (
    BucketPlan,
    CostModel,
    HostModel,
    LinkModel,
    Parameter,
    fit_link_model,
    pack_bucket,
    simulate,
)

FIRST, SECOND = (Parameter(name, 16, 4, "torch.float32", "cuda") for name in ("first", "second"))
PLAN = BucketPlan((FIRST, SECOND), (pack_bucket(0, (FIRST,)), pack_bucket(1, (SECOND,))))


def spans(timeline):
    return {interval.label: (interval.start_s, interval.end_s) for interval in timeline.intervals}


def test_an_all_reduce_waits_for_its_bucket_and_for_the_one_before():
    costs = CostModel({"first": 1.0, "second": 2.0}, 5.0, LinkModel(1.5, 0.0))
    timeline = simulate(PLAN, costs)
    assert spans(timeline) == {
        "segment 0": (0.0, 1.0),
        "bucket 0": (1.0, 2.5),
        "segment 1": (1.0, 2.0),
        "bucket 1": (2.5, 4.0),
        "rest": (2.0, 5.0),
    }
    assert timeline.exposed_ms == 0


def test_what_runs_behind_the_last_gradient_is_exposed():
    costs = CostModel({"first": 1.0, "second": 4.0}, 4.0, LinkModel(0.5, 0.25 / 64))
    timeline = simulate(PLAN, costs)
    assert timeline.end_s == pytest.approx(4.75)
    assert timeline.exposed_ms == pytest.approx(750)


def test_computing_is_slower_under_an_all_reduce():
    costs = CostModel({"first": 1.0, "second": 4.0}, 4.0, LinkModel(2.0, 0.0), contention=0.5)
    # From 1 to 3 half of the speed: one second of three is done, two remain.
    assert spans(simulate(PLAN, costs))["segment 1"] == (1.0, 5.0)
    slow = CostModel({"first": 1.0, "second": 1.5}, 1.5, LinkModel(2.0, 0.0), contention=0.5)
    assert spans(simulate(PLAN, slow))["segment 1"] == (1.0, 2.0)


def costs_of_host(ahead_s, start_s):
    """Of two gradients and one more second of work, which the host has queued so many seconds before they are done."""
    queued_s = {"first": 1.0 - ahead_s, "second": 2.0 - ahead_s}
    host = HostModel(queued_s, 3.0 - ahead_s, start_s)
    return CostModel({"first": 1.0, "second": 2.0}, 3.0, LinkModel(0.25, 0.0), host=host)


def test_a_host_that_is_ahead_changes_nothing():
    ahead = costs_of_host(ahead_s=1.0, start_s=0.25)
    assert spans(simulate(PLAN, ahead)) == {
        "segment 0": (0.0, 1.0),
        "bucket 0": (1.0, 1.25),
        "segment 1": (1.0, 2.0),
        "bucket 1": (2.0, 2.25),
        "rest": (2.0, 3.0),
    }


def test_all_that_is_queued_behind_an_all_reduce_comes_later():
    assert spans(simulate(PLAN, costs_of_host(ahead_s=0.0, start_s=0.5))) == {
        "segment 0": (0.0, 1.0),
        "bucket 0": (1.5, 1.75),
        "segment 1": (1.0, 2.5),
        "bucket 1": (3.0, 3.25),
        "rest": (2.5, 4.0),
    }
    # The first start still hides behind what the device has to do.
    assert spans(simulate(PLAN, costs_of_host(ahead_s=0.5, start_s=0.5))) == {
        "segment 0": (0.0, 1.0),
        "bucket 0": (1.0, 1.25),
        "segment 1": (1.0, 2.0),
        "bucket 1": (2.5, 2.75),
        "rest": (2.0, 3.5),
    }


def test_costs_that_cannot_be():
    link = LinkModel(0.0, 0.0)
    with pytest.raises(ValueError, match="no ready time for second"):
        simulate(PLAN, CostModel({"first": 1.0}, 1.0, link))
    with pytest.raises(ValueError, match=r"is ready at 2\.0 s of a backward of 1\.0 s"):
        CostModel({"first": 2.0}, 1.0, link)
    with pytest.raises(ValueError, match="contention"):
        CostModel({}, 1.0, link, contention=1.0)
    with pytest.raises(ValueError, match="cannot cost"):
        LinkModel(-1.0, 0.0)
    with pytest.raises(ValueError, match="0 ranks"):
        LinkModel.ring(0, 1.0, 1.0)


def test_a_model_is_found_again_in_what_it_predicts():
    link = LinkModel.ring(8, 4e-6, 1 / 300e9)
    sizes = [1 << k for k in range(10, 28, 3)]
    found = fit_link_model([(size, link.seconds(size)) for size in sizes])
    assert found.startup_s == pytest.approx(link.startup_s)
    assert found.seconds_per_byte == pytest.approx(link.seconds_per_byte)


def test_fitted_costs_are_never_negative():
    assert fit_link_model([(10, 1.0), (1000, 200.0)]).startup_s == 0.0
    assert fit_link_model([(10, 2.0), (1000, 1.0)]).seconds_per_byte == 0.0
    with pytest.raises(ValueError, match="two sizes"):
        fit_link_model([(10, 1.0), (10, 1.1)])
    with pytest.raises(ValueError, match="positive"):
        fit_link_model([(10, 0.0), (20, 1.0)])
