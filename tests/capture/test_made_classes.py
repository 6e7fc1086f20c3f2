"""Classes that a function makes in each call: they are in the graph as long as they do not leave it."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.same_as_plain import check_same

FACTOR = 4


def methods(x):
    class Thing:
        """A class of all kinds of methods."""

        factor = 3

        def __init__(self, value):
            self.value = value

        def scaled(self, by=2):
            return self.value * self.factor * by

        @staticmethod
        def more(value):
            return value + 1

        @classmethod
        def of(cls, value):
            return cls(value)

        @property
        def less(self):
            return self.value - 1

    thing = Thing.of(x)
    shown = Thing.__name__, Thing.__module__, Thing.__qualname__, isinstance(thing, Thing)
    return Thing.more(thing.scaled()) * thing.less, shown, thing.scaled(by=5)


def derived(x):
    class Total(dict):
        def total(self):
            return sum(self.values())

    class Twice(Total):
        def total(self):
            return super().total() * 2

    return Twice(p=x, q=x * 2).total()


def data_class(x):
    @dataclasses.dataclass
    class Pair:
        first: object
        second: int = 2

    @dataclasses.dataclass(frozen=True, order=True)
    class Frozen:
        a: int = 1
        b: int = 2

    pair = Pair(x)
    try:
        Frozen().a = 3
    except dataclasses.FrozenInstanceError:
        return pair.first * pair.second, Frozen(1, 2) < Frozen(2, 1), repr(Frozen(1)), Frozen(1) == Frozen(1)


def named_tuple(x):
    pair = collections.namedtuple("pair", "first second", defaults=(3,))
    return pair(x).first * pair(x).second, pair._fields, pair.__module__


def by_type(x):
    made = type("made", (object,), {"factor": 3, "times": lambda self, y: y * self.factor})
    return made().times(x), made.__module__


def custom_function(x):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x * gradient

    return Square.apply(x) + 1


def module(x):
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    return Twice()(x)


def exception(x):
    class Stop(Exception):
        pass

    try:
        raise Stop("a", 2)
    except Stop as stop:
        return x * stop.args[1]


def masked(x):
    few = torch.masked.softmax(x, -1, mask=x > -9), torch.masked.norm(x, 2, 0)
    return (
        torch.masked.sum(x, 0, mask=x > 0),
        torch.masked.mean(x, 0, mask=x > 0),
        torch.masked.amax(x, 0),
        *few,
    )


@pytest.mark.parametrize(
    "program",
    [methods, derived, data_class, named_tuple, by_type, custom_function, module, exception, masked],
)
def test_one_graph_for_all_calls(program) -> None:
    check_same(program, lambda: (torch.randn(4, 4, requires_grad=True),), calls=3)


def reads_a_global(x):
    class Thing:
        factor = FACTOR

    return x * Thing.factor


def reads_a_variable(x):
    n = 3

    class Thing:
        def scaled(self):
            return x * n

    n = n + 1
    return Thing().scaled()


def is_stored_in(x):
    class Thing:
        count = 0

    Thing.count += 1
    return x * Thing.count


def holds_a_list(x):
    made = type("made", (), {"items": [1, 2]})
    made.items.append(3)
    return x * sum(made.items)


def has_an_attribute_on_a_method(x):
    class Thing:
        def method(self):
            pass

    Thing.method.count = getattr(Thing.method, "count", 0) + 1
    return x * Thing.method.count


def raises(x):
    try:
        collections.namedtuple("pair", "a a")
    except ValueError:
        return x * 2


@pytest.mark.parametrize(
    "program",
    [reads_a_global, reads_a_variable, is_stored_in, holds_a_list, has_an_attribute_on_a_method, raises],
)
def test_what_another_call_would_find_is_left_to_plain_python(program) -> None:
    check_same(program, lambda: (torch.randn(4, requires_grad=True),), fullgraph=False, calls=3)


def test_a_global_in_the_body_is_read_in_each_call(monkeypatch) -> None:
    compiled = gradsplit.compile(reads_a_global, backend="eager")
    assert compiled(torch.ones(1)).item() == 4
    monkeypatch.setitem(globals(), "FACTOR", 5)
    assert compiled(torch.ones(1)).item() == 5


def test_a_class_that_is_handed_out_is_another_one_in_each_call() -> None:
    def make(x):
        class Thing:
            pass

        thing = Thing()
        thing.value = x * 2
        return thing

    compiled = gradsplit.compile(make, backend="eager")
    one, other = compiled(torch.ones(2)), compiled(torch.ones(2))
    assert type(one) is not type(other) and one.value.tolist() == other.value.tolist() == [2, 2]


def test_a_base_is_told_of_each_class() -> None:
    told = []

    class Base:
        def __init_subclass__(cls):
            told.append(cls.__name__)

    def program(x):
        class Thing(Base):
            factor = 2

        return x * Thing.factor

    compiled = gradsplit.compile(program, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 2
    assert told == ["Thing"] * 3
