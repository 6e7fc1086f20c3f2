# ruff: noqa - the programs are written as people write them
"""Loops, comprehensions, generators, with blocks and match, each against the plain program."""

from __future__ import annotations

import pytest

from tests.capture.compare_runs import Programs, check_program

program = Programs()


class Manager:
    def __init__(self, log, swallow=False):
        self.log = log
        self.swallow = swallow

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append(None if kind is None else kind.__name__)
        return self.swallow


class Point:
    __match_args__ = ("x", "y")

    def __init__(self, x, y):
        self.x = x
        self.y = y


@program
def while_else(x, n):
    i = 0
    while i < 5:
        if i == n + 1:
            break
        i += 1
    else:
        i = 100
    return x + i


@program
def for_else_with_continue(x, n):
    seen = []
    for i in range(10):
        if i % 2:
            continue
        if i > 2 * n:
            break
        seen.append(i)
    else:
        seen.append("all")
    return x * len(seen), seen


@program
def loop_variable_after_the_loop(x, n):
    for i in range(n):
        for j in "ab":
            pass
    return x + i, j


@program
def list_grows_while_iterated(x, n):
    items = [1]
    for item in items:
        if len(items) < 5:
            items.append(item + n)
    return x, items


@program
def nested_comprehensions(x, n):
    rows = [[i * j for j in range(3) if j != n] for i in range(3)]
    flat = [item for row in rows for item in row if item]
    return x, rows, flat, {i: {j for j in range(i)} for i in range(n)}, [(a, b) for a, b in zip(flat, "xyz")]


@program
def comprehension_with_closure(x, n):
    adders = [lambda v, k=k: v + k + n for k in range(3)]
    late = [lambda v: v + k for k in range(3)]
    return [f(x) for f in adders], [f(1) for f in late]


@program
def comprehension_walrus(x, n):
    found = [y for i in range(5) if (y := i * n) > 2]
    return x + y, found


@program
def generator_send(x, n):
    def running():
        total = 0
        while True:
            got = yield total
            if got is None:
                return total
            total += got

    machine = running()
    out = [next(machine), machine.send(1), machine.send(n)]
    try:
        machine.send(None)
    except StopIteration as stop:
        out.append(stop.value)
    return x + out[-1], out


@program
def generator_throw(x, n):
    log = []

    def work():
        while True:
            try:
                yield len(log)
            except ValueError as error:
                log.append(str(error))
            finally:
                log.append("finally")

    machine = work()
    next(machine)
    log.append(machine.throw(ValueError("bad")))
    machine.close()
    return x, log, list(machine)


@program
def generator_close_runs_finally(x, n):
    log = []

    def work():
        with Manager(log):
            yield 1
            yield 2

    machine = work()
    log.append(next(machine))
    machine.close()
    return x, log


@program
def yield_from_passes_send_and_throw(x, n):
    def inner():
        got = []
        for i in range(3):
            try:
                got.append((yield i))
            except KeyError as error:
                got.append(repr(error))
        return got

    def outer():
        result = yield from inner()
        yield result

    machine = outer()
    out = [next(machine), machine.send(n), machine.throw(KeyError("k")), machine.send("end")]
    return x, out


@program
def what_a_generator_raises_as_it_is_closed_goes_to_who_delegates_to_it(x, n):
    log = []

    def inner():
        try:
            yield 1
        finally:
            raise ValueError("inner")

    def outer():
        try:
            yield from inner()
        except ValueError as error:
            log.append(str(error))
            raise KeyError("outer") from None

    closed = outer()
    next(closed)
    try:
        closed.close()
    except KeyError as error:
        log.append(str(error))
    return x, log


@program
def yield_from_iterables(x, n):
    def all_of(*parts):
        for part in parts:
            yield from part

    return x, list(all_of([1, 2], (3,), range(n), "ab", {"k": 1}))


@program
def generator_expression_is_lazy(x, n):
    log = []

    def note(i):
        log.append(i)
        return i

    lazy = (note(i) for i in range(10))
    first = next(lazy), next(lazy)
    return x + sum(first), log, next(iter([]), None), [i for i, _ in zip(lazy, "ab")]


@program
def generator_raises_stop_iteration(x, n):
    def bad():
        yield 1
        raise StopIteration("inner")

    try:
        return x, list(bad())
    except RuntimeError as error:
        return x, str(error), type(error.__cause__)


@program
def with_several(x, n):
    log = []
    with Manager(log) as a, Manager(log) as b:
        log.append(a is b)
    with Manager(log):
        with Manager(log, True):
            raise ValueError("x")
    return x, log


@program
def with_suppresses(x, n):
    log = []
    with Manager(log, swallow=True):
        log.append(1)
        if n > 1:
            raise KeyError(n)
        log.append(2)
    return x, log


@program
def with_return_inside(x, n):
    log = []

    def inner():
        with Manager(log):
            return x + n

    return inner(), log


@program
def with_break_and_continue(x, n):
    log = []
    for i in range(4):
        with Manager(log):
            if i == 1:
                continue
            if i == n:
                break
    return x, log


@program
def try_finally_order(x, n):
    log = []

    def inner():
        for i in range(3):
            try:
                if i == n:
                    return i
                log.append(("body", i))
            except ZeroDivisionError:
                pass
            else:
                log.append(("else", i))
            finally:
                log.append(("finally", i))
        return -1

    return x + inner(), log


@program
def finally_overrides_return(x, n):
    def inner():
        try:
            return 1
        finally:
            return n

    return x + inner()


@program
def match_literals_and_sequences(x, n):
    out = []
    for value in (0, "a", [1, 2], (1, 2, 3), [], None, True, 2.5, [1, [2, 3]], "bc", range(2)):
        match value:
            case None:
                out.append("none")
            case True:
                out.append("true")
            case 0 | 1:
                out.append("small")
            case "a" | "b" as letter:
                out.append(letter)
            case []:
                out.append("empty")
            case [1, [a, b]]:
                out.append((a, b))
            case [first, second]:
                out.append((first, second))
            case [first, *rest]:
                out.append((first, rest))
            case float(f):
                out.append(f)
            case str() as text if len(text) == n:
                out.append(text)
            case _:
                out.append("other")
    return x, out


@program
def match_mappings(x, n):
    out = []
    for value in ({"kind": "a", "n": 1}, {"kind": "b"}, {"kind": "c", "more": 2, "n": n}, {}, 3):
        match value:
            case {"kind": "a", "n": k}:
                out.append(k)
            case {"kind": "c", **rest} if rest["n"] > 1:
                out.append(rest)
            case {"kind": kind}:
                out.append(kind)
            case {}:
                out.append("empty")
            case _:
                out.append("no mapping")
    return x, out


@program
def match_classes(x, n):
    out = []
    for value in (Point(0, n), Point(1, 2), Point(n, n), 3, "s", (Point(1, 1), 2)):
        match value:
            case Point(0, y):
                out.append(("axis", y))
            case Point(x=a, y=b) if a == b:
                out.append(("diagonal", a))
            case Point():
                out.append("point")
            case int(k):
                out.append(k)
            case (Point(x=1), k):
                out.append(("tuple", k))
            case _:
                out.append("other")
    return x, out


@program
def match_dotted_constants(x, n):
    match n:
        case Limits.ONE:
            return x + 1
        case Limits.TWO:
            return x + 2
    return x


class Limits:
    ONE = 1
    TWO = 2


@program
def unpacking(x, n):
    a, (b, *c), d = 1, [2, 3, n], "de"
    (e, f), *g = d, a, b
    first, *_, last = range(5)
    [h, i] = {"k": 1, "l": 2}
    return x, a, b, c, d, e, f, g, first, last, h, i


@program
def unpacking_errors(x, n):
    out = []
    for value in ([1], [1, 2, 3], 5):
        try:
            a, b = value
        except (ValueError, TypeError) as error:
            out.append((type(error), str(error)))
    try:
        a, *b, c = [1]
    except ValueError as error:
        out.append(str(error))
    return x, out


@program
def star_expressions(x, n):
    def collect(*args, **named):
        return args, named

    pairs = [("k", 1)]
    return (
        x,
        [*range(n), *"ab"],
        {*[1, 1], 2} == {1, 2},
        {"a": 1, "b": 2, **dict(pairs)},
        collect(*[1], 2, *(3,), q=1, r=2, **dict(pairs)),
    )


@program
def chained_comparisons_evaluate_once(x, n):
    log = []

    def note(value):
        log.append(value)
        return value

    return x, 0 < note(n) < note(2) < note(9), log


@program
def short_circuit(x, n):
    return x, (n > 1 and []) or "default", not n, (n or 1) and 0, None or n, n if n > 1 else -n


@program
def deletes(x, n):
    a = [1, 2, 3, 4]
    b = {"k": 1, "l": 2}
    del a[0], a[-1], b["k"]
    c = a
    del a
    try:
        return a
    except UnboundLocalError as error:
        return x, c, b, type(error), str(error)


@program
def recursion(x, n):
    def depth(tree):
        return 1 + max(map(depth, tree), default=0)

    def fibonacci(k):
        return k if k < 2 else fibonacci(k - 1) + fibonacci(k - 2)

    return x * fibonacci(n + 5), depth([[], [[], [[]]]])


@program
def augmented_targets(x, n):
    items, table = [1, 2], {"k": [1]}
    items[n - n] += 5
    table["k"] += [2]
    items *= 2
    x += 1
    return x, items, table


@program
def tensors_in_loops(x, n):
    states = [x]
    while len(states) <= n:
        states.append(states[-1] * 2 + len(states))
    total = sum(state.sum() for state in states)
    return total, {i: s.mean() for i, s in enumerate(states)}, max(len(s) for s in states)


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)
