"""``copy.copy`` and ``copy.deepcopy`` in a captured function."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


class Settings:
    def __init__(self):
        self.sizes = [1, 2]
        self.names = {"a": (3, [4])}
        self.itself = self


class Stack(list):
    pass


def shared_parts(x, held):
    items = [1]
    copied = copy.deepcopy({"one": items, "two": items, "three": (items, 2), "four": (1, 2)})
    copied["one"].append(5)
    return copied, copied["one"] is copied["two"], copied["three"][0] is items, items


def deep_object(x, held):
    copied = copy.deepcopy(held["settings"])
    copied.sizes.append(3)
    copied.names["a"][1][0] = 9
    return x + sum(copied.sizes), copied.itself is copied, held["settings"].sizes, held["settings"].names


def shallow_object(x, held):
    copied = copy.copy(held["settings"])
    copied.sizes.append(3)
    copied.extra = x
    return held["settings"].sizes, hasattr(held["settings"], "extra"), copied.itself is held["settings"]


def subclasses(x, held):
    stack = copy.deepcopy(held["stack"])
    stack.append(stack.note)
    return type(stack).__name__, list(stack), held["stack"] == [1, [2]], stack[1] is held["stack"][1]


def other_containers(x, held):
    copied = copy.deepcopy(held["ordered"])
    copied.update(b=2)
    counts = copy.copy(held["counts"])
    counts["new"].append(1)
    return copied, held["ordered"], counts, held["counts"], copy.deepcopy({1, 2}) == {1, 2}


def queues(x, held):
    copied = copy.deepcopy(held["queue"])
    copied[0].append(1)
    copied.append(2)
    return copied, held["queue"], copy.copy(held["queue"]), type(copied)


def make_held():
    stack = Stack([1, [2]])
    stack.note = "n"
    counts = collections.defaultdict(list, old=[0])
    return {
        "settings": Settings(),
        "stack": stack,
        "ordered": collections.OrderedDict(a=1),
        "counts": counts,
        "queue": collections.deque([[0], 1], maxlen=2),
    }


@pytest.mark.parametrize(
    "function", [shared_parts, deep_object, shallow_object, subclasses, other_containers, queues]
)
def test_same_as_plain(function):
    compiled = CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)
    for _ in range(2):
        assert str(compiled(torch.ones(1), make_held())) == str(function(torch.ones(1), make_held()))


def test_an_object_with_its_own_copy_ends_the_graph():
    class Own:
        def __deepcopy__(self, memo):
            return "own"

    compiled = CompiledFunction(
        lambda x, own: (x + 1, copy.deepcopy(own)), lambda graph, inputs: graph.module
    )
    assert compiled(torch.ones(1), Own())[1] == "own"
    assert compiled.break_reasons[0].reason_id == "copy"
