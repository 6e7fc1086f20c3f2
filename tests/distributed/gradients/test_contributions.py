"""Which buckets are started when, as contributions come in any order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradsplit.distributed.gradients.contributions import Contributions


def test_a_bucket_waits_for_its_last_gradient_and_the_buckets_before_it():
    found = Contributions([("a", "b"), ("c",)], {"a": 1, "b": 2, "c": 1})
    found.arrived(["a", "b", "c"])
    assert list(found.take_complete()) == []
    assert not found.is_started("c")
    found.arrived(["b"])
    assert list(found.take_complete()) == [0, 1]
    assert found.is_started("c")
    assert list(found.take_rest()) == []


def test_what_nobody_announced_may_still_come():
    found = Contributions([("a",), ("b",)], {"b": 1})
    found.arrived(["b"])
    assert list(found.take_complete()) == []
    found.arrived(["a"])
    assert list(found.take_complete()) == [0, 1]


def test_the_rest_is_started_in_order():
    found = Contributions([("a",), ("b",), ("c",)], {"a": 1, "b": 1, "c": 1})
    found.arrived(["a", "c"])
    assert list(found.take_complete()) == [0]
    assert list(found.take_rest()) == [1, 2]
    assert found.stored == {"a", "c"}


def test_nothing_unused_is_waited_for_and_news_of_it_count_for_nothing():
    found = Contributions([("a", "b"), ("c",), ("d",)], {"a": 1, "c": 2, "d": 1}, unused={"b", "c"})
    found.nothing_comes(["b"])
    assert list(found.take_complete()) == []
    found.arrived(["a"])
    assert list(found.take_complete()) == [0, 1]
    found.arrived(["d"])
    assert list(found.take_complete()) == [2]


def test_contributions_are_counted():
    found = Contributions([("a", "b"), ("c",)], {"a": 3})
    found.arrived(["a", "b"])
    found.arrived(["b"])
    assert found.counts() == {"a": 1, "b": 2, "c": 0}
    assert found.left("a") == 2


def test_what_turned_out_to_be_undefined_holds_up_nothing():
    found = Contributions([("a", "b")], {"a": 2, "b": 1})
    assert not found.has_begun
    found.nothing_comes(["a", "b"])
    assert found.has_begun and list(found.take_complete()) == []
    found.arrived(["a"])
    assert list(found.take_complete()) == [0]
    assert found.stored == {"a"}


@given(st.data())
def test_every_bucket_is_started_once_in_order_and_complete(data: st.DataObject):
    names = [f"p{k}" for k in range(data.draw(st.integers(1, 8)))]
    counts = {name: data.draw(st.integers(1, 3)) for name in names}
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1), max_size=3))) if len(names) > 1 else []
    bounds = [0, *cuts, len(names)]
    buckets = [names[begin:end] for begin, end in itertools.pairwise(bounds)]
    arrivals = data.draw(st.permutations([name for name in names for _ in range(counts[name])]))
    found = Contributions(buckets, counts)
    started: list[int] = []
    left = dict(counts)
    for name in arrivals:
        assert not found.is_started(name)
        found.arrived([name])
        left[name] -= 1
        for bucket in found.take_complete():
            assert not any(left[member] for member in buckets[bucket])
            started.append(bucket)
    assert started == list(range(len(buckets)))
    assert list(found.take_rest()) == []
