"""Values that differ between calls, or between the branches of one class of values, decide as in plain Python.

Each program runs on several arguments in turn, as one graph and behind a graph break.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import gc
import io
import random
import types
import weakref

import pytest
import torch

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.same_as_plain import assert_same

NAN = float("nan")


class Whole(int):
    """Has the texts of its base."""


class Named(dict):
    """Has the texts of its base."""


class Dotted(dict):
    """Its attributes are its items, by methods written in C."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class OwnDict(dict):
    """Its attributes are its items, as it is its own ``__dict__``."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Shape(abc.ABC):  # noqa: B024, nothing is abstract in it
    """Knows its classes by registration."""


class Circle:
    """Is registered in the middle of a test."""

    value = 0


def outcome(function, given):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            result = function(torch.ones(2), *given)
        except Exception as error:
            result = type(error), error.args
    return [result, repr(given), printed.getvalue()]


def behind_a_break(program):
    def breaks_first(x, *given):
        gradsplit.graph_break()
        return program(x, *given)

    return breaks_first


def shared(one, other):
    """Two names of one object, which a deep copy keeps."""
    return one, other


def text(x, value):
    return x + 1, f"{value}", f"{value!r}", str(value), f"{len(str(value)):>4}"


def padded(x, value):
    try:
        return x + 1, f"{value:>8}", format(value, "04d")
    except TypeError as error:
        return x, str(error)


def union(x, one, other):
    made = one | other
    return x + 1, type(made), list(made.items()), getattr(made, "default_factory", None)


def own_copy(x, mapping):
    made = mapping.copy()
    made["new"] = 1
    return x + 1, made


def adds(x, members):
    members.add(5)
    return x + len(members)


def takes_last(x, mapping):
    return x + 1, mapping.popitem()


def equal(x, one, other):
    return x + (1 if one == other else 2), one != other


def position(x, one, other):
    return x + [one, other].index(other), (one, 1) == (other, 1), other in [one]


def keys_found(x, number):
    table = {5.0: x, 6: x + 1, True: x + 2}
    return table[number] * number, list(table), table.get(number) is x


def method_as_value(x, number):
    compare = number.__eq__
    print("between")
    return x + 1, compare(2), compare(number)


CASES = [
    (text, [({"a": 1},), ({"a": 1, "b": 2},), ({"b": 2, "a": 1},), ({1: "a"},), ({True: "a"},), ({},)]),
    (text, [(Named(a=1),), (Named(a=1, b=2),), (Named(),), ([{"a": 1}],), ([{"b": 1}],)]),
    (text, [({8, 16, 0},), ({16, 8, 0},), ({0, 16, 8},), (frozenset([16, 8]),), (frozenset([8, 16]),)]),
    (padded, [(3,), (Whole(3),), (Whole(4),)]),
    (
        union,
        [
            ({"a": 1}, collections.OrderedDict(a=2, b=2)),
            ({"a": 1}, collections.defaultdict(list, {"b": 2})),
            (collections.defaultdict(list, {"b": 2}), {"a": 1}),
            (collections.OrderedDict(b=2), collections.defaultdict(list, {"a": 1})),
            (types.MappingProxyType({"a": 1}), {"b": 2}),
            ({"a": 1}, types.MappingProxyType({"b": 2})),
        ],
    ),
    (own_copy, [({"a": 1},), (types.MappingProxyType({"a": 1}),), (types.MappingProxyType({"b": 1}),)]),
    (adds, [({1},), (frozenset([1]),), ({5},)]),
    (takes_last, [({1: 2},), (types.MappingProxyType({1: 2}),)]),
    (equal, [(bytearray(b"a"), b"a"), (bytearray(b"b"), b"a"), (b"a", bytearray(b"a"))]),
    (equal, [("abc".upper, "abc".lower), ("abc".upper, "abc".upper), (len, len), (len, 1), (list[int], list[int])]),
    (position, [(1.5, 2.5), (2.5, 2.5), shared(NAN, NAN), (2.5, NAN), (NAN, float("nan")), (NAN, 2.5)]),
    (keys_found, [(5,), (6,), (1,), (5.0,), (6.0,), (1.0,)]),
    (method_as_value, [(1,), (2,), (3,), (2.0,)]),
]  # fmt: skip


def plain_copy(given):
    """A copy for one call; what cannot change, or cannot be copied, stays."""
    return [copy.copy(item) if isinstance(item, (list, dict, set, bytearray)) else item for item in given]


@pytest.mark.parametrize(("program", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("wrapped", [lambda program: program, behind_a_break], ids=["whole", "behind"])
def test_as_in_plain_python(program, arguments, wrapped):
    plain = wrapped(program)
    compiled = CompiledFunction(plain, lambda graph, inputs: graph.module)
    for given in [*arguments, *arguments[::-1]]:
        assert_same(outcome(plain, plain_copy(given)), outcome(compiled, plain_copy(given)), repr(given))


BYTES = bytearray(b"a")


def reads_global_bytes(x):
    return x + (1 if BYTES == b"a" else 2)


def test_globals_written_in_c_compare_as_in_python():
    compiled = CompiledFunction(reads_global_bytes, lambda graph, inputs: graph.module)
    try:
        for held in (b"a", b"b", b"a"):
            BYTES[:] = held
            assert torch.equal(compiled(torch.ones(2)), reads_global_bytes(torch.ones(2)))
    finally:
        BYTES[:] = b"a"


def test_compilation_leaves_pythons_random_numbers():
    """What a compilation imports, or a backend does, may draw some."""

    def compile_graph(graph, inputs):
        random.random()
        return graph.module

    compiled = CompiledFunction(lambda x: x + 1, compile_graph)
    before = random.getstate()
    compiled(torch.ones(2))
    assert random.getstate() == before


def items_are_attributes(x, table, number):
    before = table.a, table["a"], len(table)
    table.b = number
    between = table.get("b"), table.b
    table["c"] = x * number
    after = table.c, table.get("c"), sorted(table)
    del table.a
    return before, between, after, "a" in table


@pytest.mark.parametrize("wrapped", [lambda program: program, behind_a_break], ids=["whole", "behind"])
@pytest.mark.parametrize("cls", [Dotted, OwnDict])
def test_dictionaries_whose_items_are_attributes(cls, wrapped):
    plain = wrapped(items_are_attributes)
    compiled = CompiledFunction(plain, lambda graph, inputs: graph.module)
    for items, number in [({"a": 1}, 2), ({"a": 1, "b": 5}, 2), ({"a": 3, "c": 1, "b": 2}, 3), ({"a": 1}, 2)]:
        one, other = cls(**items), cls(**items)
        expected, found = plain(torch.ones(2), one, number), compiled(torch.ones(2), other, number)
        assert_same(expected, found, "results")
        assert_same(list(one.items()), list(other.items()), "the dictionary")
        assert list(vars(one)) == list(vars(other))


def knows_shapes(x, shape):
    return x + 1 if isinstance(shape, Shape) and issubclass(type(shape), Shape) else x - 1


def test_a_class_that_is_registered_later():
    compiled = CompiledFunction(knows_shapes, lambda graph, inputs: graph.module)
    assert compiled(torch.ones(1), Circle()).item() == 0
    Shape.register(Circle)
    assert compiled(torch.ones(1), Circle()).item() == 2


def appends_and_reads(x, one, other):
    one.append(1)
    return x + len(other)


def test_lists_of_which_one_has_grown_may_be_one_list():
    """One whose length differed before is another kind of value than one whose length did not."""
    compiled = CompiledFunction(appends_and_reads, lambda graph, inputs: graph.module)
    for one, other in [([1], [2]), ([1, 2], [2]), ([1, 2, 3], [2]), (None, [1]), ([1], [2]), (None, [1])]:
        given, twin = list(other), list(other)
        found = compiled(torch.ones(2), given if one is None else list(one), given)
        assert torch.equal(found, appends_and_reads(torch.ones(2), twin if one is None else list(one), twin))
        assert given == twin


def breaks_twice(x, holder):
    gradsplit.graph_break()
    y = x + holder.value
    print(end="")
    return y * 2


def test_nothing_of_a_call_is_kept_for_its_graph_breaks():
    """The reasons of breaks are kept; the frames in which they were found would keep the call's tensors."""
    compiled = CompiledFunction(breaks_twice, lambda graph, inputs: graph.module)
    for _ in range(2):
        x, holder = torch.ones(2), Circle()
        holder.value = 1
        seen = [weakref.ref(x), weakref.ref(holder)]
        compiled(x, holder)
        del x, holder
        gc.collect()
        assert [found() for found in seen] == [None, None]
    assert compiled.break_reasons


class NoLoop(Circle):
    """Sets methods to None, which says that there are none, whatever the bases have."""

    __contains__ = None
    __iter__ = None

    def __getitem__(self, index):
        return [1, 2][index]


def refusals(x, value):
    said = []
    for ask in (lambda: 1 in value, lambda: list(value), lambda: value[0]):
        try:
            said.append(ask())
        except TypeError as error:
            said.append(str(error))
    return x, said


def test_special_methods_that_are_none():
    compiled = CompiledFunction(refusals, lambda graph, inputs: graph.module)
    assert_same(refusals(torch.ones(1), NoLoop()), compiled(torch.ones(1), NoLoop()), "results")


def uses_a_global(x):
    try:
        # The test defines it later.
        return x + SETTING  # pyright: ignore[reportUndefinedVariable]
    except NameError:
        return x - 1


def test_a_global_that_is_defined_later():
    compiled = CompiledFunction(uses_a_global, lambda graph, inputs: graph.module)
    assert compiled(torch.ones(1)).item() == 0
    globals()["SETTING"] = 5
    try:
        assert compiled(torch.ones(1)).item() == 6
    finally:
        del globals()["SETTING"]
    assert compiled(torch.ones(1)).item() == 0


class ByNumber:
    """Hashes and compares by what it holds."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return isinstance(other, ByNumber) and self.number == other.number


def stores(x, table, key):
    table[key] = 5
    return x + len(table), list(table.items())


ONE, OTHER = Circle(), Circle()
KEYS = [
    [([ONE], OTHER), ([OTHER], ONE), ([OTHER], OTHER), ([ONE, OTHER], OTHER), ([OTHER, ONE], OTHER), ([], ONE)],
    [(map(ByNumber, held), ByNumber(key)) for held, key in [([2], 1), ([1], 1), ([2], 3), ([3], 3), ([], 1)]],
]  # fmt: skip


@pytest.mark.parametrize("cases", KEYS, ids=["by identity", "by number"])
def test_keys_that_are_objects_of_the_program(cases):
    compiled = CompiledFunction(stores, lambda graph, inputs: graph.module)
    for held, key in cases:
        plain = dict.fromkeys(held, 1)
        given = dict(plain)
        assert_same(stores(torch.ones(1), plain, key), compiled(torch.ones(1), given, key), "results")
        assert list(plain.items()) == list(given.items())


def prints(x):
    print("plain")
    return x + len("ab")


def test_builtins_that_are_replaced_later(monkeypatch, capsys):
    """A rank that is to be silent does so with ``print``."""
    compiled = CompiledFunction(prints, lambda graph, inputs: graph.module)
    assert compiled(torch.ones(1)).item() == 3
    assert capsys.readouterr().out == "plain\n"
    monkeypatch.setattr("builtins.print", lambda text: None)
    assert compiled(torch.ones(1)).item() == 3
    assert capsys.readouterr().out == ""
