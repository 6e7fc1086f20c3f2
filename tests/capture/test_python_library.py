# ruff: noqa - the programs are written as people write them
"""The standard library around a computation: contextlib, typing, copy, time, random, os, logging, warnings."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import sys
import time
import typing
import warnings
from typing import Optional, TypedDict, Union

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.compare_runs import Programs, check_program

program = Programs()
logger = logging.getLogger("tests.capture.quiet")


class Movie(TypedDict, total=False):
    name: str
    year: int


class Annotated:
    a: int = 1
    b: Optional[str] = None


@contextlib.contextmanager
def tracked(log, name):
    log.append(f"enter {name}")
    try:
        yield name.upper()
    except ValueError as error:
        log.append(f"error {error}")
        raise
    finally:
        log.append(f"exit {name}")


@contextlib.contextmanager
def swallowing(log):
    try:
        yield
    except KeyError:
        log.append("swallowed")


class Closing:
    def __init__(self, log):
        self.log = log

    def close(self):
        self.log.append("closed")


@program
def context_managers(x, n):
    log = []
    with tracked(log, "a") as a, tracked(log, "b") as b:
        log.append((a, b))
    with swallowing(log):
        raise KeyError
    try:
        with tracked(log, "c"):
            raise ValueError("v")
    except ValueError:
        log.append("outer")
    return x, log


@program
def exit_stacks(x, n):
    log = []
    with contextlib.ExitStack() as stack:
        for i in range(n):
            stack.enter_context(tracked(log, str(i)))
        stack.callback(log.append, "callback")
        stack.push(lambda *args: log.append("pushed"))
        log.append("body")
    return x, log


@program
def suppress_and_friends(x, n):
    log = []
    with contextlib.suppress(KeyError, IndexError):
        {}["k"]
    with contextlib.closing(Closing(log)) as c:
        log.append(c is not None)
    with contextlib.nullcontext(n) as v:
        log.append(v)
    return x, log


@program
def as_decorator(x, n):
    log = []

    @tracked(log, "deco")
    def inner(v):
        log.append("in")
        return v * 2

    return inner(x), inner(n), log


@program
def torch_and_python_contexts(x, n):
    log = []
    with torch.no_grad(), tracked(log, "g"):
        y = x * 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        z = torch.is_grad_enabled()
    return y, z, torch.is_grad_enabled(), log


@program
def typing_things(x, n):
    m = Movie(name="a", year=n)
    m2: Movie = {"name": "b"}
    return (
        x,
        m,
        m2,
        typing.cast(int, n),
        typing.get_type_hints(Annotated)["a"] is int,
        Optional[int] == Union[int, None],
        typing.get_origin(list[int]) is list,
        typing.get_args(dict[str, int]),
        typing.TYPE_CHECKING,
    )


@program
def copies(x, n):
    a = [1, [2, {"k": (3,)}]]
    b = copy.copy(a)
    c = copy.deepcopy(a)
    c[1][1]["k"] = n
    return (
        x,
        a,
        b[1] is a[1],
        c,
        c[1] is a[1],
        copy.copy((1, 2)),
        copy.deepcopy(None),
        copy.copy(Closing([])).log,
    )


@program
def local_variables(x, n):
    k = 3
    if n > 100:
        absent = 1

    def inner():
        return k, sys.intern("absent"), absent

    shown = locals()
    shown["k"] = 9
    return (
        x * shown["n"] + k,
        list(shown),
        shown["x"] is x,
        "{n} {k}".format(**shown),
        inner is shown["inner"],
    )


@program
def quiet_logging(x, n):
    logger.debug("value %s", n)
    if logger.isEnabledFor(logging.DEBUG):
        x = x + 100
    return x


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def compiled(function, **settings):
    return CompiledFunction(function, lambda graph, inputs: graph.module, **settings)


def test_environment_is_read_at_each_call(monkeypatch):
    def run(x):
        return x + int(os.environ.get("GRADSPLIT_TEST_NUMBER", "1")), os.getenv("GRADSPLIT_TEST_NUMBER")

    step = compiled(run)
    for number in (None, "5", "6", None):
        if number is None:
            monkeypatch.delenv("GRADSPLIT_TEST_NUMBER", raising=False)
        else:
            monkeypatch.setenv("GRADSPLIT_TEST_NUMBER", number)
        for _ in range(2):
            found, plain = step(torch.zeros(1)), run(torch.zeros(1))
            assert torch.equal(found[0], plain[0]) and found[1] == plain[1]


def test_random_state_is_the_plain_programs():
    def run(x):
        return x * random.random() + random.randint(1, 100), random.choice("abc"), random.sample(range(10), 3)

    step = compiled(run)
    for seed in range(3):
        random.seed(seed)
        plain = run(torch.ones(1)), random.getstate()
        random.seed(seed)
        found = step(torch.ones(1)), random.getstate()
        assert torch.equal(plain[0][0], found[0][0]) and plain[0][1:] == found[0][1:] and plain[1] == found[1]


def test_shuffle_and_own_generators():
    own = random.Random(3)

    def run(x, items):
        random.shuffle(items)
        return x + own.random(), items

    step = compiled(run)
    for _ in range(2):
        random.seed(1)
        own.seed(5)
        plain = run(torch.ones(1), [1, 2, 3, 4])
        random.seed(1)
        own.seed(5)
        found = step(torch.ones(1), [1, 2, 3, 4])
        assert torch.equal(plain[0], found[0]) and plain[1] == found[1]


def test_time_goes_on():
    def run(x):
        return x + 1, time.time(), time.perf_counter()

    step = compiled(run)
    first, second = step(torch.ones(1)), step(torch.ones(1))
    assert second[1] > first[1] and second[2] > first[2]


def _give_messages(x, n):
    x = x.sin()
    warnings.warn(
        f"careful {x.shape[0]}",
        DeprecationWarning,
    )
    logging.getLogger(logger.name).info("seen %d of %s, %f", x.shape[0], ("two", 2), n)
    logger.log(logging.DEBUG, "no arguments, 5 %")
    warnings.warn("again")
    return x.cos()


def _outcome(run, n, action, records):
    """What a call gives and says, from which line."""
    globals().pop("__warningregistry__", None)
    records.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(action)
        try:
            result = run(torch.ones(2), n).tolist()
        except Warning as raised:
            result = repr(raised)
    said = [(record.getMessage(), record.levelno, record.lineno, record.funcName) for record in records]
    return result, said, [(str(one.message), one.category, one.filename, one.lineno) for one in warned]


def test_messages_are_given_at_each_call_in_one_graph():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    step = compiled(_give_messages, fullgraph=True)
    try:
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logger.setLevel(level)
            for number, action in enumerate(("always", "default", "ignore", "error", "once")):
                want = _outcome(_give_messages, number + 0.5, action, records)
                assert _outcome(step, number + 0.5, action, records) == want
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    assert len(step.entries) <= 4


def test_messages_of_data_or_of_other_lines_end_the_graph():
    def run(x):
        warnings.warn("of the caller's line", stacklevel=2)
        logger.warning("%s", x.sum())
        return x + 1

    step = compiled(run)
    for _ in range(2):
        with pytest.warns(UserWarning, match="caller"):
            step(torch.ones(1))
    assert [reason.reason_id for reason in step.break_reasons] == ["warning"]


def test_prints_are_made_at_each_call(capsys):
    def run(x, n):
        print("n is", n)
        y = x + n
        print(y.shape)
        return y

    step = compiled(run)
    for _ in range(2):
        step(torch.ones(2), 1)
        assert capsys.readouterr().out == "n is 1\ntorch.Size([2])\n"


def test_data_of_the_library_is_guarded():
    def run(x):
        return x + sys.getrecursionlimit(), sys.argv[0], len(sys.path)

    step = compiled(run)
    before = list(sys.argv)
    try:
        for name in ("one", "two"):
            sys.argv[0] = name
            assert step(torch.zeros(1))[1] == name
    finally:
        sys.argv[:] = before
