"""``contextvars``: what a variable holds is guarded, what the program sets is set, and given back."""

from __future__ import annotations

import contextlib
import contextvars

import pytest
import torch

import gradsplit
from gradsplit.compile_core.errors import Unsupported

SCALE = contextvars.ContextVar("scale", default=2)
OTHER: contextvars.ContextVar = contextvars.ContextVar("other")
LOG = contextvars.ContextVar("log", default=[])  # noqa: B039  (that all contexts share the list is what is tested)


def reads(x):
    return x * SCALE.get() * OTHER.get(3) * len(SCALE.name)


def reads_what_is_missing(x):
    try:
        return x * OTHER.get()
    except LookupError as error:
        return x * 5, error.args[0] is OTHER


def leaves_it_set(x):
    SCALE.set(SCALE.get() + 1)
    OTHER.set(x * SCALE.get())
    return OTHER.get() + 1


def gives_it_back(x):
    outer = SCALE.set(5)
    inner = SCALE.set(7)
    first = x * SCALE.get()
    SCALE.reset(inner)
    second = x * SCALE.get()
    SCALE.reset(outer)
    return first, second, x * SCALE.get(), OTHER.get(None)


def gives_it_back_in_another_order(x):
    outer, inner = SCALE.set(5), SCALE.set(7)
    SCALE.reset(outer)
    SCALE.reset(inner)
    return x * SCALE.get()


@contextlib.contextmanager
def scaled_by(number):
    token = SCALE.set(number)
    try:
        yield
    finally:
        SCALE.reset(token)


def managed(x):
    with contextlib.suppress(ValueError), scaled_by(4):
        x = x * SCALE.get()
        raise ValueError
    return x * SCALE.get()


def changes_what_it_holds(x):
    LOG.get().append(len(LOG.get()))
    return x * len(LOG.get())


PROGRAMS = [
    reads, reads_what_is_missing, leaves_it_set, gives_it_back, gives_it_back_in_another_order, managed,
    changes_what_it_holds,
]  # fmt: skip


def outcomes(function):
    """Of three calls as the variables change outside, and what they hold then."""
    found = []
    for step in range(4):
        if step == 2:
            OTHER.set(step)
            SCALE.set(9)
        found.append((function(torch.ones(2)), SCALE.get(), OTHER.get(None), len(LOG.get())))
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_plain(program):
    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    expected = contextvars.copy_context().run(outcomes, program)
    LOG.get().clear()
    found = contextvars.copy_context().run(outcomes, compiled)
    LOG.get().clear()
    torch.testing.assert_close(found, expected)


def breaks_inside(x):
    with scaled_by(4):
        y = x * SCALE.get()
        gradsplit.graph_break()
        y = y * SCALE.get()
    token = SCALE.set(6)
    gradsplit.graph_break()
    y = y * SCALE.get()
    SCALE.reset(token)
    return y * SCALE.get()


def test_a_break_while_it_is_set():
    x = torch.ones(2)
    assert torch.equal(gradsplit.compile(breaks_inside, backend="eager")(x), breaks_inside(x))
    assert SCALE.get() == 2


@pytest.mark.parametrize("misused", ["of another", "used"])
def test_tokens_that_python_refuses(misused):
    def program(x):
        token = SCALE.set(3) if misused == "used" else OTHER.set(3)
        if misused == "used":
            SCALE.reset(token)
        SCALE.reset(token)
        return x * 2

    def run():
        with pytest.raises(Unsupported, match="ContextVar is given a Token"):
            gradsplit.compile(program, backend="eager", fullgraph=True)(torch.ones(2))
        with pytest.raises((RuntimeError, ValueError), match=r"already been used|different ContextVar"):
            gradsplit.compile(program, backend="eager")(torch.ones(2))

    contextvars.copy_context().run(run)
