"""Guards on classes, functions, modules of Python and of torch: see ``guard_cases``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.guard_cases import Bag, Case, X, check_case, put


def python_module(text: str) -> types.ModuleType:
    """A module of Python made from source."""
    module = types.ModuleType("made_for_guards")
    exec(text, module.__dict__)
    return module


def family() -> Any:
    """An object whose class has a parent and a grandparent."""
    grandparent = type(
        "Grandparent", (), {"scale": 2, "spare": 2, "method": lambda self: 3, "__len__": lambda self: 4}
    )
    parent = type("Parent", (grandparent,), {})
    return type("Child", (parent,), {})()


def with_super() -> Any:
    class Grandparent:
        def part(self) -> int:
            return 2

        def total(self) -> int:
            return 3

    class Parent(Grandparent):
        pass

    class Child(Parent):
        def total(self) -> int:
            return super().total() + super().part()

    return Child()


def with_property() -> Any:
    class Owner:
        def __init__(self) -> None:
            self.hidden = 2
            self.other = 2

        @property
        def shown(self) -> int:
            return self.hidden

    return Owner()


def with_fallback() -> Any:
    class Owner:
        def __init__(self) -> None:
            self.held = {"a": 1, "b": 1}

        def __getattr__(self, name: str) -> int:
            return self.held[name]

    return Owner()


@dataclasses.dataclass
class Settings:
    scale: int = 1
    spare: int = 1


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


Pair = namedtuple("Pair", "first second")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Identity()})
        self.scale = nn.Parameter(torch.ones(3))
        self.spare = nn.Parameter(torch.ones(3))
        self.shift = None
        self.drop = nn.Dropout(0.5)
        self.drop.eval()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.drop(self.named["a"](x)) * self.scale
        return x if self.shift is None else x + self.shift


FUNCTIONS = """
SCALE, SPARE = 2, 2

def helper(x, factor=2, *, power=1):
    return x * factor ** power * SCALE

def spare(x):
    return x

def unread(x):
    return x

def main(x):
    return helper(x) + len([1, 2])
"""

CLASSES: dict[str, Case] = {
    "attribute of a grandparent": Case(
        lambda w: X * w.scale,
        family,
        lambda w: put(type(w).__mro__[2], "scale", 5),
        lambda w: put(type(w).__mro__[2], "spare", 5),
    ),
    "attribute shadowed by a parent": Case(
        lambda w: X * w.scale,
        family,
        lambda w: put(type(w).__mro__[1], "scale", 5),
        lambda w: put(type(w).__mro__[1], "spare", 5),
    ),
    "method replaced": Case(
        lambda w: X * w.method(),
        family,
        lambda w: put(type(w).__mro__[2], "method", lambda self: 7),
        lambda w: put(type(w), "other", lambda self: 7),
    ),
    "method shadowed by the instance": Case(
        lambda w: X * w.method(), family, lambda w: put(w, "method", lambda: 8), lambda w: put(w, "spare", 1)
    ),
    "method shadowed by a parent": Case(
        lambda w: X * w.method(),
        family,
        lambda w: put(type(w).__mro__[1], "method", lambda self: 7),
        lambda w: put(type(w).__mro__[1], "spare", 7),
    ),
    "absent attribute that a parent gets": Case(
        lambda w: X if hasattr(w, "extra") else X + 1,
        family,
        lambda w: put(type(w).__mro__[1], "extra", 1),
        lambda w: put(type(w).__mro__[1], "spare", 1),
    ),
    "truth of an object without a rule": Case(
        lambda w: X if w else X + 1,
        Settings,
        lambda w: put(w, "__class__", type("False_", (Settings,), {"__bool__": lambda self: False})),
        lambda w: put(w, "spare", 1),
    ),
    "attribute that becomes a property": Case(
        lambda w: X * w.scale,
        lambda: type("Owner", (Bag,), {})(scale=2),
        lambda w: put(type(w), "scale", property(lambda self: 5)),
        lambda w: put(type(w), "spare", property(lambda self: 5)),
    ),
    "operator": Case(
        lambda w: X * (w + 1),
        lambda: type("Number", (), {"__add__": lambda self, other: 2})(),
        lambda w: put(type(w), "__add__", lambda self, other: 3),
        lambda w: put(type(w), "__sub__", lambda self, other: 3),
    ),
    "call": Case(
        lambda w: w(X),
        lambda: type("Callable", (), {"__call__": lambda self, x: x + 2})(),
        lambda w: put(type(w), "__call__", lambda self, x: x + 3),
        lambda w: put(w, "__call__", lambda x: x + 4),
    ),
    "super": Case(
        lambda w: X * w.total(),
        with_super,
        lambda w: put(type(w).__mro__[1], "total", lambda self: 7),
        lambda w: put(type(w).__mro__[1], "spare", 7),
    ),
    "super, inserted between": Case(
        lambda w: X * w.total(),
        with_super,
        lambda w: put(type(w).__mro__[1], "part", lambda self: 7),
        lambda w: put(type(w).__mro__[1], "spare", 7),
    ),
    "forward of a module's class": Case(
        lambda w: w(X),
        lambda: type("Layer", (nn.ReLU,), {})(),
        lambda w: put(type(w), "forward", lambda self, x: x - 1),
        lambda w: put(type(w), "backward", lambda self, x: x - 1),
    ),
    "length of an object": Case(
        lambda w: X * len(w),
        family,
        lambda w: put(type(w), "__len__", lambda self: 7),
        lambda w: put(w, "__len__", lambda: 7),
    ),
    "class of the instance": Case(
        lambda w: X * w.scale,
        family,
        lambda w: put(w, "__class__", type("Other", (type(w),), {"scale": 9})),
        lambda w: put(w, "spare", 9),
    ),
    "isinstance": Case(
        lambda w: X if isinstance(w[0], int) else X + 1,
        lambda: [1, 1],
        lambda w: w.__setitem__(0, "text"),
        lambda w: w.__setitem__(1, "text"),
    ),
    "property": Case(
        lambda w: X * w.shown, with_property, lambda w: put(w, "hidden", 5), lambda w: put(w, "other", 5)
    ),
    "property replaced": Case(
        lambda w: X * w.shown,
        with_property,
        lambda w: put(type(w), "shown", property(lambda self: 9)),
        lambda w: put(type(w), "spare", property(lambda self: 9)),
    ),
    "attribute by __getattr__": Case(
        lambda w: X * w.a, with_fallback, lambda w: w.held.update(a=4), lambda w: w.held.update(b=4)
    ),
    "attribute that __getattr__ made up": Case(
        lambda w: X * w.a, with_fallback, lambda w: put(w, "a", 4), lambda w: put(w, "c", 4)
    ),
    "attribute deleted": Case(
        lambda w: X * w.scale,
        lambda: Settings(scale=3),
        lambda w: delattr(w, "scale"),
        lambda w: delattr(w, "spare"),
    ),
    "dataclass": Case(
        lambda w: X * dataclasses.replace(w, spare=1).scale,
        Settings,
        lambda w: put(w, "scale", 3),
        lambda w: put(w, "more", 3),
    ),
    "enumeration": Case(
        lambda w: X if w.mode is Mode.ONE else X + 1,
        lambda: Bag(mode=Mode.ONE, spare=Mode.ONE),
        lambda w: put(w, "mode", Mode.TWO),
        lambda w: put(w, "spare", Mode.TWO),
    ),
    "named tuple": Case(
        lambda w: X * w.pair.first,
        lambda: Bag(pair=Pair(1, 2)),
        lambda w: put(w, "pair", Pair(3, 2)),
        lambda w: put(w, "pair", Pair(1, 3)),
    ),
    "nested containers": Case(
        lambda w: X * w["a"][1]["b"][0],
        lambda: {"a": [0, {"b": (1, 2)}]},
        lambda w: w["a"][1].update(b=(5, 2)),
        lambda w: w["a"][1].update(b=(1, 5), c=1),
    ),
    "truth of a list": Case(
        lambda w: X if w else X + 1, lambda: [1], lambda w: w.clear(), lambda w: w.__setitem__(0, 2)
    ),
    "default dictionary": Case(
        lambda w: X * w["a"],
        lambda: defaultdict(int, a=1, b=1),
        lambda w: w.update(a=2),
        lambda w: w.update(b=2),
    ),
    "nan": Case(
        lambda w: X * w[0],
        lambda: [float("nan"), 1.0],
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__setitem__(1, float("nan")),
    ),
    "dtype": Case(
        lambda w: X.to(w[0]),
        lambda: [torch.float64, torch.float64],
        lambda w: w.__setitem__(0, torch.int32),
        lambda w: w.__setitem__(1, torch.int32),
    ),
    "slice": Case(
        lambda w: X[w[0]],
        lambda: [slice(1), 0],
        lambda w: w.__setitem__(0, slice(2)),
        lambda w: w.__setitem__(1, 1),
    ),
    "bound method": Case(
        lambda w: X * w.call(),
        lambda: Bag(call=family().method, method=family().method),
        lambda w: put(w, "call", family().__len__),
        lambda w: put(w, "method", 1),
    ),
    "dead reference": Case(
        lambda w: X if w["weak"]() is None else X + 1,
        lambda: (target := Settings()) and {"weak": weakref.ref(target), "target": target},
        lambda w: w.pop("target"),
        lambda w: w.update(more=1),
    ),
}

FUNCTION_CASES: dict[str, Case] = {
    "global constant of a callee": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w, "SCALE", 3),
        lambda w: put(w, "SPARE", 3),
    ),
    "global callee": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w, "helper", torch.neg),
        lambda w: put(w, "spare", torch.neg),
    ),
    "builtin shadowed": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w, "len", lambda items: 9),
        lambda w: put(w, "sum", lambda items: 9),
    ),
    "defaults": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w.helper, "__defaults__", (5,)),
        lambda w: put(w.spare, "__defaults__", (5,)),
    ),
    "keyword defaults": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w.helper, "__kwdefaults__", {"power": 2}),
        lambda w: put(w.spare, "__kwdefaults__", {"power": 2}),
    ),
    "code of a global function": Case(
        lambda w: w.main(X),
        lambda: python_module(FUNCTIONS),
        lambda w: put(w.helper, "__code__", w.spare.__code__),
        lambda w: put(w.unread, "__code__", w.main.__code__),
    ),
}

MODULES: dict[str, Case] = {
    "layer appended": Case(
        lambda w: w(X),
        Blocks,
        lambda w: w.layers.append(nn.Tanh()),
        lambda w: w.named.add_module("c", nn.ReLU()),
    ),
    "layer replaced": Case(
        lambda w: w(X),
        Blocks,
        lambda w: w.layers.__setitem__(1, nn.Tanh()),
        lambda w: w.named.__setitem__("b", nn.Tanh()),
    ),
    "layer of a dictionary": Case(
        lambda w: w(X),
        Blocks,
        lambda w: w.named.__setitem__("a", nn.ReLU()),
        lambda w: w.named.pop("b"),
    ),
    "parameter becomes None": Case(
        lambda w: w(X), Blocks, lambda w: put(w.layers[0], "bias", None), lambda w: put(w, "spare", None)
    ),
    "attribute becomes a parameter": Case(
        lambda w: w(X),
        Blocks,
        lambda w: (delattr(w, "shift"), put(w, "shift", nn.Parameter(torch.ones(3)))),
        lambda w: put(w, "more", nn.Parameter(torch.ones(3))),
    ),
    "training": Case(lambda w: w(X) * 0, Blocks, lambda w: w.drop.train(), lambda w: w.first.eval() and None),
    "constant of a layer": Case(
        lambda w: w(X) * 0,
        lambda: Blocks().train(),
        lambda w: put(w.drop, "p", 0.25),
        lambda w: put(w.first, "p", 0.25),
    ),
    "tied parameters": Case(
        lambda w: w.second(w.first(X)),
        Blocks,
        lambda w: put(w.second, "weight", nn.Parameter(torch.eye(3))),
        lambda w: put(w, "spare", w.scale),
    ),
    "existence of a submodule": Case(
        lambda w: X if hasattr(w, "extra") else X + 1,
        Blocks,
        lambda w: w.add_module("extra", nn.ReLU()),
        lambda w: w.add_module("another", nn.ReLU()),
    ),
    "gradient": Case(
        lambda w: X if w.scale.grad is None else X + 1,
        Blocks,
        lambda w: put(w.scale, "grad", torch.ones(3)),
        lambda w: put(w.spare, "grad", torch.ones(3)),
    ),
    "a leaf or not": Case(
        lambda w: X * w[0].is_leaf * 1,
        lambda: [torch.ones(1, requires_grad=True), 0],
        lambda w: w.__setitem__(0, torch.ones(1, requires_grad=True) * 1),
        lambda w: w.__setitem__(0, torch.zeros(1, requires_grad=True)),
    ),
    "views of one tensor": Case(
        lambda w: w[0].add_(w[1]),
        lambda: [torch.ones(3), torch.ones(3), torch.ones(4)],
        lambda w: (w.__setitem__(0, w[2][1:]), w.__setitem__(1, w[2][:3])),
        lambda w: w.__setitem__(1, torch.zeros(4)[1:]),
    ),
}

CASES = {**CLASSES, **FUNCTION_CASES, **MODULES}


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_is_guarded(name: str, guard_form: str) -> None:
    check_case(CASES[name])


def test_a_bound_method_in_c_is_asked_for_at_each_call(guard_form: str) -> None:
    """Such a method is made anew at each look-up: Python calls the one that is there, and nothing is guarded."""
    compiled = gradsplit.compile(lambda w: w.call(X), backend="eager")
    for factor in (2, 2, 3):
        world = Bag(call=functools.partial(torch.mul, other=factor).__call__)
        assert torch.equal(compiled(world), X * factor)
