# ruff: noqa - the programs are written as people write them
"""What a call changes of things that existed before: order, identity and aliases as in the plain program."""

from __future__ import annotations

import types

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.compare_runs import Comparison, check_program


class Thing:
    def __init__(self, value):
        self.value = value
        self.items = []


def aliases(x, a, b):
    a.append(1)
    b.append(2)
    c = a
    c.append(x)
    return a is b, len(b), c


def contains_itself(x, a):
    a.append(a)
    return a[-1] is a, a[-1][-1] is a, a


def made_here_twice(x, table):
    made = Thing(x)
    table["one"] = made
    table["two"] = [made]
    made.items.append(table)
    return made


def cyclic_result(x):
    a, b = [1], {}
    a.append(b)
    b["a"] = a
    t = Thing(a)
    t.self = t
    return a, t


def swap(x, a, b):
    a[0], b[0] = b[0], a[0]
    a[:], b[:] = b[:], a[:]
    return a, b


def move_between(x, table):
    table["b"] = table.pop("a")
    table["b"].append(table["c"])
    table["c"] = x
    return table["b"]


def attribute_chain(x, thing):
    thing.next = Thing(thing)
    thing.next.value.items.append(x)
    thing.value = thing.next.value.value + 1
    del thing.items
    thing.items = [thing.next]
    return thing.next


def order_of_keys(x, table):
    first = table.pop("a")
    table["z"] = 1
    table["a"] = first
    table.setdefault("m", x)
    del table["z"]
    table["z"] = 2
    return list(table)


def clears(x, a, table, members):
    kept = list(a)
    a.clear()
    table.clear()
    members.clear()
    a.extend(kept[:1])
    table["k"] = a
    return kept


def tensors_shared(x, a):
    a.append(x)
    a.append(x)
    a.append(x + 1)
    x.add_(1)
    return a[-2] is x, a[-3] is a[-2], a


def views_and_bases(x, table):
    row = x[0]
    table["row"] = row
    x.mul_(2)
    table["again"] = row
    return table["row"] is table["again"], row.sum()


def same_list_in_two_arguments(x, outer, inner):
    inner.append(x)
    return outer[0] is inner, len(outer[0]), outer


def tuple_of_lists(x, pair):
    pair[0].append(pair[1])
    pair[1].append(x)
    return pair


def default_mutation(x, items=[]):
    items.append(x.shape[0])
    return list(items)


def make_lists(seed):
    items = [1]
    return torch.ones(2, 2), items, items if seed % 2 else [1]


CASES = [
    (aliases, make_lists),
    (contains_itself, lambda seed: (torch.ones(1), [seed])),
    (made_here_twice, lambda seed: (torch.ones(1), {})),
    (cyclic_result, lambda seed: (torch.ones(1),)),
    (swap, lambda seed: (torch.ones(1), [1, 2], [3, [4]])),
    (move_between, lambda seed: (torch.ones(1), {"a": [1], "c": {"k": 2}})),
    (attribute_chain, lambda seed: (torch.ones(1), Thing(seed))),
    (order_of_keys, lambda seed: (torch.ones(1), {"a": 1, "b": 2})),
    (clears, lambda seed: (torch.ones(1), [[1], 2], {"k": 1}, {1, 2})),
    (tensors_shared, lambda seed: (torch.ones(2), [])),
    (views_and_bases, lambda seed: (torch.ones(2, 2), {})),
    (same_list_in_two_arguments, lambda seed: (lambda i: (torch.ones(1), [i], i))([seed])),
    (tuple_of_lists, lambda seed: (torch.ones(1), ([1], [2]))),
]


@pytest.mark.parametrize("function, make", CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_same_as_plain(function, make):
    check_program(function, make)


def test_default_arguments_keep_what_is_stored():
    made = types.FunctionType(default_mutation.__code__, globals(), "made", ([],))
    compiled = CompiledFunction(made, lambda graph, inputs: graph.module)
    assert [compiled(torch.ones(k)) for k in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert made.__defaults__ == ([1, 2, 3],)


def test_module_attributes():
    module = types.ModuleType("someone")
    module.count = 1
    module.items = []

    def run(x):
        module.count += 1
        module.made = x + module.count
        module.items.append(module.count)
        first = hasattr(module, "gone")
        module.gone = 1
        del module.gone
        return module.made, first, hasattr(module, "gone")

    compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
    result = compiled(torch.zeros(1))
    assert (
        module.count == 2
        and module.made is result[0]
        and module.items == [2]
        and result[1:] == (False, False)
    )
    compiled(torch.zeros(1))
    assert module.count == 3 and module.made.item() == 3 and not hasattr(module, "gone")


def test_effects_before_an_exception_happen_once():
    def run(x, log):
        log.append("before")
        if x.shape[0] == 2:
            raise KeyError("stop")
        log.append("after")
        return x

    compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
    for size in (1, 2, 2, 1):
        plain, found = [], []
        for function, log in ((run, plain), (compiled, found)):
            try:
                function(torch.ones(size), log)
            except KeyError as error:
                log.append(error.args)
        assert plain == found


def test_two_cells_and_a_global_share_one_list():
    shared = [1]
    other = shared

    def run(x):
        shared.append(2)
        other.append(3)
        return x, shared is other, len(shared)

    compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
    result = compiled(torch.ones(1))
    assert shared == [1, 2, 3] and result[1:] == (True, 3)
    Comparison().same([shared, other], [shared, other])
