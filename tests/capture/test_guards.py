"""What was read is guarded, and only that: each case changes something that was read, and something that was not.

Both forms of the check, the interpreted program and the generated Python, must see the same.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.guard_checks import check
from tests.capture.guard_cases import Bag, Case, X, check_case, put


class Options:
    scale = 2
    unused = 5

    def __init__(self) -> None:
        self.shift = 1
        self.other = 1


class Layer(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("spare", torch.zeros(3))
        self.inner = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.kind = "relu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight + self.mean
        return self.inner(y) if self.kind == "relu" else y


def set_cell(function: Any, name: str, value: Any) -> None:
    function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value


def new_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    factor, spare = 2, 3

    def inner(x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        return x * spare if use_spare else x * factor

    return inner


def has_attribute(w: Any) -> torch.Tensor:
    return X + 1 if hasattr(w, "extra") else X


def read_attribute_class(w: Any) -> torch.Tensor:
    return X * w.scale


def get_weak(w: Any) -> torch.Tensor:
    return X * w.reference().shift


def make_weak() -> Any:
    target = Options()
    return Bag(target=target, reference=weakref.ref(target))


def fresh_class() -> Any:
    return type("Fresh", (Options,), {})()


def replace_weak(w: Any) -> None:
    w.target.shift = 9


CASES: dict[str, Case] = {
    "attribute": Case(
        lambda w: X + w.shift, Options, lambda w: put(w, "shift", 3), lambda w: put(w, "other", 3)
    ),
    "attribute type": Case(
        lambda w: X + w.shift, Options, lambda w: put(w, "shift", True), lambda w: put(w, "other", True)
    ),
    "negative zero": Case(
        lambda w: X * w[0],
        lambda: [0.0, 0.0],
        lambda w: w.__setitem__(0, -0.0),
        lambda w: w.__setitem__(1, -0.0),
    ),
    "equal constant, another object": Case(
        lambda w: X + w[0],
        lambda: [1000, 1],
        lambda w: w.__setitem__(0, 1001),
        lambda w: w.__setitem__(0, int("1000")),
    ),
    "class attribute": Case(
        read_attribute_class,
        fresh_class,
        lambda w: put(type(w), "scale", 7),
        lambda w: put(type(w), "unused", 7),
    ),
    "class attribute, shadowed": Case(
        read_attribute_class, fresh_class, lambda w: put(w, "scale", 7), lambda w: put(w, "unused", 7)
    ),
    "absent attribute": Case(
        has_attribute, Options, lambda w: put(w, "extra", 1), lambda w: put(w, "something", 1)
    ),
    "list item": Case(
        lambda w: X + w[0], lambda: [1, 2], lambda w: w.__setitem__(0, 5), lambda w: w.__setitem__(1, 5)
    ),
    "list length": Case(
        lambda w: X + len(w), lambda: [1, 2], lambda w: w.append(1), lambda w: w.__setitem__(0, "other")
    ),
    "dictionary item": Case(
        lambda w: X + w["a"], lambda: {"a": 1, "b": 2}, lambda w: w.update(a=5), lambda w: w.update(b=5, c=1)
    ),
    "dictionary keys": Case(
        lambda w: sum(w.values(), X), lambda: {"a": 1, "b": 2}, lambda w: w.update(c=5), lambda w: w.update()
    ),
    "dictionary order": Case(
        lambda w: X + next(iter(w)),
        lambda: {1: 1, 2: 2},
        lambda w: w.__setitem__(1, w.pop(1)),
        lambda w: None,
    ),
    "ordered dictionary": Case(
        lambda w: X + next(iter(w)),
        lambda: collections.OrderedDict({1: 1, 2: 2}),
        lambda w: w.move_to_end(1),
        lambda w: w.__setitem__(2, 0),
    ),
    "key type": Case(
        lambda w: X if type(next(iter(w))) is int else X + 1,
        lambda: {1: 0},
        lambda w: (w.clear(), w.update({True: 0})),
        lambda w: w.__setitem__(1, 7),
    ),
    "absent key": Case(
        lambda w: X + 1 if "c" in w else X, lambda: {"a": 1}, lambda w: w.update(c=5), lambda w: w.update(b=5)
    ),
    "set": Case(
        lambda w: X + (3 in w[0]), lambda: [{1, 2}, 0], lambda w: w[0].add(3), lambda w: w.__setitem__(1, 4)
    ),
    "partial": Case(
        lambda w: w.call(X),
        lambda: Bag(call=functools.partial(torch.add, alpha=2, other=1), also=1),
        lambda w: put(w, "call", functools.partial(torch.add, alpha=3, other=1)),
        lambda w: put(w, "also", 2),
    ),
    "closure cell": Case(
        lambda w: w(X), new_closure, lambda w: set_cell(w, "factor", 5), lambda w: set_cell(w, "spare", 5)
    ),
    "weak reference": Case(get_weak, make_weak, replace_weak, lambda w: put(w.target, "other", 9)),
    "parameter's shape": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w.weight, "data", torch.ones(1)),
        lambda w: put(w.bias, "data", torch.ones(1)),
    ),
    "parameter's strides": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w.weight, "data", torch.ones(3, 2)[:, 0]),
        lambda w: put(w.weight, "data", torch.full((3,), 2.0)),
    ),
    "parameter's dtype": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w.weight, "data", w.weight.data.double()),
        lambda w: put(w.bias, "data", w.bias.data.double()),
    ),
    "parameter requires grad": Case(
        lambda w: w(X),
        Layer,
        lambda w: w.weight.requires_grad_(False),
        lambda w: w.bias.requires_grad_(False),
    ),
    "parameter, another one": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w, "weight", nn.Parameter(torch.ones(1))),
        lambda w: put(w, "weight", nn.Parameter(torch.full((3,), 4.0))),
    ),
    "parameter set_": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w.weight, "data", w.weight.data.set_(torch.ones(1))),
        lambda w: w.weight.data.fill_(3.0),
    ),
    "buffer": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w, "mean", torch.zeros(2, 3)),
        lambda w: put(w, "spare", torch.zeros(2, 3)),
    ),
    "buffer, lazily negated": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w, "mean", torch.ones(3, dtype=torch.complex64).mul(1j).conj().imag),
        lambda w: put(w, "spare", torch.ones(3, dtype=torch.complex64).mul(1j).conj().imag),
    ),
    "submodule": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w, "inner", nn.Identity()),
        lambda w: put(w, "unused", nn.Identity()),
    ),
    "submodule's constant": Case(
        lambda w: w(X), Layer, lambda w: put(w, "kind", "none"), lambda w: put(w.inner, "in_features", 7)
    ),
    "hook": Case(
        lambda w: w(X),
        Layer,
        lambda w: w.inner.register_forward_hook(lambda module, args, result: result * 2),
        lambda w: w.unused.register_forward_hook(lambda module, args, result: result * 2),
    ),
    "forward of an instance": Case(
        lambda w: w(X),
        Layer,
        lambda w: put(w.inner, "forward", torch.neg),
        lambda w: put(w.unused, "forward", torch.neg),
    ),
    "same object twice": Case(
        lambda w: X + 1 if w[0] is w[1] else X,
        lambda: [shared := Options(), shared, 0],
        lambda w: w.__setitem__(1, Options()),
        lambda w: w.__setitem__(2, Options()),
    ),
    "tensor's shape": Case(
        lambda w: w[0] * 2,
        lambda: [torch.ones(3), torch.ones(3)],
        lambda w: w.__setitem__(0, torch.ones(4)),
        lambda w: w.__setitem__(1, torch.ones(4)),
    ),
    "tensor's rank": Case(
        lambda w: w[0] * 2,
        lambda: [torch.ones(3), 0],
        lambda w: w.__setitem__(0, torch.ones(3, 1)),
        lambda w: w.__setitem__(0, torch.zeros(3)),
    ),
    "tensor's type": Case(
        lambda w: w[0] * 2,
        lambda: [torch.ones(3), 0],
        lambda w: w.__setitem__(0, nn.Parameter(torch.ones(3), requires_grad=False)),
        lambda w: w.__setitem__(0, torch.zeros(3)),
    ),
    "tensor's layout": Case(
        lambda w: w[0] * 2,
        lambda: [torch.ones(3), 0],
        lambda w: w.__setitem__(0, torch.ones(3).to_sparse()),
        lambda w: w.__setitem__(0, torch.zeros(3)),
    ),
    "tensor's device": Case(
        lambda w: w[0] * 2,
        lambda: [torch.ones(3), 0],
        lambda w: w.__setitem__(0, torch.ones(3, device="meta")),
        lambda w: w.__setitem__(0, torch.zeros(3)),
    ),
    "conjugated": Case(
        lambda w: torch.view_as_real(w[0] + 1),
        lambda: [torch.ones(3, dtype=torch.complex64), 0],
        lambda w: w.__setitem__(0, w[0].conj()),
        lambda w: w.__setitem__(0, torch.zeros(3, dtype=torch.complex64)),
    ),
    "overlapping": Case(
        lambda w: w[0].add_(1) + w[1],
        lambda: [torch.ones(3), torch.ones(3), 0],
        lambda w: w.__setitem__(1, w[0]),
        lambda w: w.__setitem__(1, torch.zeros(3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_is_guarded(name: str, guard_form: str) -> None:
    check_case(CASES[name])


SCALE = 2
UNREAD = 2


def test_globals(guard_form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = gradsplit.compile(lambda x: x * SCALE, backend="eager")
    compiled(X)
    monkeypatch.setitem(globals(), "UNREAD", 3)
    compiled(X)
    assert len(compiled.entries) == 1
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert torch.equal(compiled(X), X * 3)
    assert len(compiled.entries) == 2


def test_a_global_that_goes_away(guard_form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = gradsplit.compile(lambda x: x * SCALE, backend="eager")
    compiled(X)
    monkeypatch.delitem(globals(), "SCALE")
    with pytest.raises(NameError):
        compiled(X)


def test_both_forms_return_the_same_inputs() -> None:
    layer = Layer()
    compiled = gradsplit.compile(layer, backend="eager")
    compiled(X)
    entry = compiled._run.entries[0]
    python = check.compile_python_check(entry.captured)(layer, X)
    interpreted = check.compile_check(entry.captured)(layer, X)
    assert len(python) == len(interpreted) == len(entry.captured.graph.inputs)
    assert all(one is other for one, other in zip(python, interpreted, strict=True))


def test_a_check_does_not_keep_objects_alive(guard_form: str) -> None:
    class Owner:
        def __init__(self) -> None:
            self.shift = 3

    owner = Owner()
    compiled = gradsplit.compile(lambda x, o: x + o.shift, backend="eager")
    compiled(X, owner)
    compiled(X, owner)
    reference = weakref.ref(owner)
    del owner
    assert reference() is None


def test_an_interrupt_during_a_check_is_passed_on(guard_form: str) -> None:
    class Switch:
        interrupts = False

        def __hash__(self) -> int:
            return hash("a")

        def __eq__(self, other: object) -> bool:
            if self.interrupts:
                raise KeyboardInterrupt
            return False

    switch = Switch()
    world = {switch: 0, "a": 1}
    compiled = gradsplit.compile(lambda w: X + w["a"], backend="eager")
    assert torch.equal(compiled(world), X + 1)
    Switch.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        compiled(world)
