# ruff: noqa - the programs are written as people write them
"""Iterators: built-in ones, itertools and operator, each against the plain program."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch

import gradsplit
from tests.capture.compare_runs import Programs, check_program

program = Programs()


class Last(StopIteration):
    pass


class Countdown:
    def __init__(self, n, kind=StopIteration):
        self.n = n
        self.kind = kind

    def __iter__(self):
        return self

    def __next__(self):
        self.n -= 1
        if self.n < 0:
            raise self.kind(self.n, "over")
        return self.n


@program
def what_ends_an_iterator(x, n):
    def delegates(kind):
        result = yield from Countdown(n, kind)
        yield result

    ends = []
    for kind in (StopIteration, Last):
        countdown = Countdown(n, kind)
        try:
            while True:
                next(countdown)
        except StopIteration as end:
            ends.append((end.value, end.args, type(end).__name__))
    return x + 1, list(delegates(StopIteration)), list(delegates(Last)), ends, next(Countdown(0), "default")


@program
def endless(x, n):
    c = itertools.count(n)
    cyc = itertools.cycle("ab")
    rep = itertools.repeat(x)
    return (
        next(c),
        next(c),
        [next(cyc) for _ in range(5)],
        next(rep) is next(rep),
        list(itertools.islice(itertools.count(1, 0.5), 3)),
        list(zip(itertools.repeat(1), "ab")),
    )


@program
def chains(x, n):
    return (
        x,
        list(itertools.chain([1], (2,), "a", range(n))),
        list(itertools.chain.from_iterable([[1], [2, 3]])),
        list(itertools.chain()),
    )


@program
def slices(x, n):
    return (
        x,
        list(itertools.islice(range(10), n)),
        list(itertools.islice(range(10), 2, 8, 3)),
        list(itertools.islice(iter("abc"), 1, None)),
        list(itertools.islice([], 5)),
    )


@program
def combinatorics(x, n):
    return (
        x,
        list(itertools.product("ab", range(2))),
        list(itertools.product([0, 1], repeat=2)),
        list(itertools.permutations([1, 2, 3], 2)),
        list(itertools.combinations("abc", 2)),
        list(itertools.combinations_with_replacement("ab", 2)),
        len(list(itertools.permutations(range(3)))),
    )


@program
def filters(x, n):
    return (
        x,
        list(itertools.takewhile(lambda v: v < n + 1, range(5))),
        list(itertools.dropwhile(lambda v: v < 2, [1, 2, 0])),
        list(itertools.filterfalse(lambda v: v % 2, range(5))),
        list(itertools.compress("abcd", [1, 0, n, 0])),
        list(filter(None, [0, 1, "", "a"])),
    )


@program
def accumulations(x, n):
    return (
        list(itertools.accumulate([1, 2, n])),
        list(itertools.accumulate([x, x], operator.add)),
        list(itertools.accumulate([3, 1, 2], max)),
        list(itertools.accumulate([1, 2], initial=100)),
    )


@program
def pairs(x, n):
    return (
        x,
        list(itertools.pairwise("abc")),
        list(itertools.zip_longest("ab", range(3), fillvalue=n)),
        list(itertools.starmap(pow, [(2, 3), (3, 2)])),
        list(itertools.zip_longest([1], [2])),
    )


@program
def groups(x, n):
    data = sorted(["apple", "bat", "bear", "ant"], key=lambda w: w[0])
    return (
        x,
        [(k, list(g)) for k, g in itertools.groupby(data, key=lambda w: w[0])],
        [(k, len(list(g))) for k, g in itertools.groupby([1, 1, 2, n, 1])],
    )


@program
def tees(x, n):
    a, b = itertools.tee(iter([1, 2, n]))
    first = next(a)
    return x, first, list(b), list(a)


@program
def tensors_through_itertools(x, n):
    parts = itertools.chain.from_iterable(zip(x.unbind(0), itertools.repeat(x[0])))
    return [p * i for i, p in zip(itertools.count(1), parts)], list(itertools.starmap(torch.add, [(x, 1)]))


@program
def builtin_iterators(x, n):
    e = enumerate("abc", start=n)
    m = map(lambda a, b: a + b, [1, 2], [3, 4])
    f = filter(lambda v: v > 1, range(4))
    z = zip([1, 2], "ab", strict=True)
    r = reversed([1, 2, 3])
    return (
        x,
        next(e),
        list(e),
        list(m),
        list(f),
        list(z),
        list(r),
        list(reversed(range(3))),
        list(reversed((1, 2))),
        list(reversed({"a": 1, "b": 2})),
        "".join(reversed("abc")),
        next(iter({"k": 1}.values())),
    )


@program
def zip_strict_errors(x, n):
    out = []
    for args in (([1], [1, 2]), ([1, 2], [1])):
        try:
            list(zip(*args, strict=True))
        except ValueError as error:
            out.append(str(error))
    return x, out, list(zip()), list(zip([1, 2], [3])), list(zip(*[(1, 2), (3, 4)]))


@program
def iterators_are_shared(x, n):
    it = iter(range(6))
    return x, list(zip(it, it)), iter(it) is it, next(it, "done")


@program
def sentinels(x, n):
    values = [3, 2, 1, 0]
    return x, list(iter(values.pop, 3 - n)), values


@program
def sums_and_tests(x, n):
    return (
        x,
        any([]),
        all([]),
        any(v > 1 for v in range(n + 1)),
        sum([1.5, 2]),
        sum([[1], [2]], []),
        sum((x, x)),
        sum([], x),
        max(1, 2.5),
        min("b", "a"),
        max([x.shape[0], 1]),
        sum(range(5)),
        sum([True, True]),
        min((2, "a"), (1, "b")),
    )


@program
def ranges(x, n):
    r = range(2, 10, 3)
    return (
        x,
        r[1],
        r[-1],
        len(r),
        5 in r,
        6 in r,
        r.start,
        r.stop,
        r.step,
        list(r[1:]),
        r.index(5),
        r.count(2),
        range(3) == range(0, 3),
        bool(range(0)),
        list(range(5, 0, -2)),
        range(n),
    )


@program
def operator_functions(x, n):
    return (
        operator.add(x, 1),
        operator.itemgetter(1)([1, 2]),
        operator.itemgetter(0, 2)("abc"),
        operator.attrgetter("shape")(x),
        operator.attrgetter("real.imag", "numerator")(n),
        operator.methodcaller("upper")("a"),
        operator.methodcaller("sum", dim=0)(x),
        operator.not_(n),
        operator.truth([]),
        operator.is_(None, None),
        operator.is_not(n, None),
        operator.contains([1, 2], n),
        operator.concat([1], [2]),
        operator.countOf([1, 1, 2], 1),
        operator.indexOf([1, 2], 2),
        operator.neg(n),
        operator.mod(7, 3),
        operator.lt(n, 2),
        operator.length_hint([1, 2]),
    )


@program
def operator_stores(x, n):
    items, table = [1, 2], {"a": 1}
    operator.setitem(items, 0, n)
    operator.delitem(table, "a")
    items2 = operator.iadd(items, [3])
    return (
        x,
        items,
        table,
        items2 is items,
        operator.getitem(items, 1),
        sorted([(1, "b"), (2, "a")], key=operator.itemgetter(1)),
        operator.index(n),
        operator.call(len, "ab"),
    )


@program
def getters_as_keys(x, n):
    rows = [{"k": 2}, {"k": 1}]
    get = operator.itemgetter("k")
    return x, sorted(rows, key=get), list(map(get, rows)), max(rows, key=get)["k"]


@program
def lazy_map_of_tensors(x, n):
    lazy = map(torch.relu, [x, -x])
    first = next(lazy)
    return first, [v + 1 for v in lazy], list(lazy)


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def test_an_iterator_that_comes_in_is_advanced():
    def run(x, it):
        return x + next(it), it

    from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction

    compiled = CompiledFunction(run, lambda graph, inputs: graph.module)
    for make in (lambda: iter([1, 2, 3]), lambda: (v for v in (1, 2, 3)), lambda: zip([1, 2, 3])):
        it = make()
        try:
            compiled(torch.ones(1), it)
        except TypeError:
            pass
        assert len(list(it)) == 2


@pytest.mark.parametrize("items", [[1, 2], (1, 2)], ids=["list", "tuple"])
def test_an_ended_iterator_is_of_its_class(items):
    def sums(x, items):
        iterator = iter(items)
        return x + sum(iterator), iterator

    found = gradsplit.compile(sums, backend="eager", fullgraph=True)(torch.ones(1), items)[1]
    assert type(found) is type(iter(items)) and list(found) == []
