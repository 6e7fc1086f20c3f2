"""Weak references: made in the frame, in weak containers, and of objects that may be dead by then."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import gradsplit
from tests.capture.same_as_plain import check_same


class Thing:
    factor = 3


KEPT = Thing()
FACTORS = weakref.WeakKeyDictionary({KEPT: 5})
THINGS = weakref.WeakSet([KEPT])
NAMED = weakref.WeakValueDictionary({"kept": KEPT})


def of_what_there_is(x):
    reference = weakref.ref(KEPT)
    return x * reference().factor, reference is weakref.ref(KEPT), reference() is KEPT, reference


def of_what_the_frame_makes(x):
    y, thing = x * 2, Thing()
    return weakref.ref(y)() + 1, weakref.ref(thing)().factor


def in_weak_containers(x):
    return x * FACTORS[KEPT] * NAMED["kept"].factor, KEPT in THINGS, len(THINGS)


def of_an_integer(x):
    try:
        weakref.ref(3)
    except TypeError as error:
        return x * 2, str(error)


@pytest.mark.parametrize(
    "program", [of_what_there_is, of_what_the_frame_makes, in_weak_containers, of_an_integer]
)
def test_weak_references_are_in_the_graph(program) -> None:
    check_same(program, lambda: (torch.randn(3, requires_grad=True),))


def of_nobodys(x):
    reference = weakref.ref(Thing())
    return x * (2 if reference() is None else 3)


def of_what_is_taken_out(x, things):
    reference = weakref.ref(things["a"])
    del things["a"]
    return x * (2 if reference() is None else 3)


def of_what_is_put_in_and_out(x, things):
    things["b"] = Thing()
    reference = weakref.ref(things["b"])
    del things["b"]
    return x * (2 if reference() is None else 3)


@pytest.mark.parametrize("program", [of_what_is_taken_out, of_what_is_put_in_and_out])
def test_whether_something_is_still_alive_is_left_to_plain_python(program) -> None:
    compiled = gradsplit.compile(program, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2), {"a": Thing()}).tolist() == [2, 2]
    check_same(of_nobodys, lambda: (torch.ones(2),), fullgraph=False)


def test_no_guard_keeps_the_object() -> None:
    compiled = gradsplit.compile(
        lambda x, thing: x * weakref.ref(thing)().factor, backend="eager", fullgraph=True
    )
    thing = Thing()
    assert compiled(torch.ones(2), thing).tolist() == [3, 3]
    other = Thing()
    other.factor = 4
    assert compiled(torch.ones(2), other).tolist() == [4, 4]
    died = weakref.ref(thing)
    del thing
    gc.collect()
    assert died() is None


def adds_to_a_member(x, members):
    total = x
    for member in members:
        total = total * member.factor
    return total


def test_another_member_is_noticed() -> None:
    compiled = gradsplit.compile(lambda x: x * (2 if KEPT in THINGS else 3), backend="eager")
    assert compiled(torch.ones(1)).item() == 2
    THINGS.discard(KEPT)
    try:
        assert compiled(torch.ones(1)).item() == 3
    finally:
        THINGS.add(KEPT)
    other = Thing()
    other.factor = 7
    members = weakref.WeakSet([other])
    compiled = gradsplit.compile(adds_to_a_member, backend="eager")
    assert compiled(torch.ones(1), members).item() == 7
    other.factor = 8
    assert compiled(torch.ones(1), members).item() == 8


LAYER = torch.nn.Linear(3, 3)
PROXY, LAYER_PROXY = weakref.proxy(KEPT), weakref.proxy(LAYER)


def through_proxies(x):
    return LAYER_PROXY(x) * PROXY.factor + LAYER_PROXY.weight.sum(), LAYER_PROXY.training


def test_what_a_proxy_stands_for_is_left_to_plain_python() -> None:
    check_same(through_proxies, lambda: (torch.randn(3, requires_grad=True),), fullgraph=False)


class Owner:
    def __init__(self):
        self.calls, self.held = 0, Thing()


def counts_first(x, owner, reference):
    owner.calls += 1
    return x * reference().factor


def lets_go_first(x, owner, reference):
    owner.held = None
    return x * (2 if reference() is None else 3)


def test_a_store_counts_where_it_may_let_go_of_the_object() -> None:
    owner = Owner()
    reference = weakref.ref(owner.held)
    counting = gradsplit.compile(counts_first, backend="eager", fullgraph=True)
    assert counting(torch.ones(1), owner, reference).item() == 3 and owner.calls == 1
    letting = gradsplit.compile(lets_go_first, backend="eager")
    assert letting(torch.ones(1), owner, reference).item() == 2
