"""Loops with a graph break in them: what the iterators have left is all there, and a round is captured once."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.compare_runs import Programs, check_program

programs = Programs()


class Holder:
    pass


@programs
def a_list_that_grows(x):
    items = [1.0, 2.0]
    for item in items:
        gradsplit.graph_break()
        x = x * item
        if len(items) < 6:
            items.append(item + 1)
    return x, items


@programs
def a_list_that_shrinks(x):
    items = [1.0, 2.0, 3.0, 4.0]
    for item in items:
        gradsplit.graph_break()
        x = x + item
        items.pop()
    return x, items


@programs
def an_iterator_that_is_taken_from_twice(x):
    numbers, out = iter([1.0, 2.0, 3.0, 4.0, 5.0]), []
    for one, other in zip(numbers, range(9)):  # noqa: B905 - they differ in length
        gradsplit.graph_break()
        x = x + one * other
        out.append(next(numbers, None))
    for place, one in enumerate(numbers):
        gradsplit.graph_break()
        out.append((place, one, next(numbers, None)))
    return x, out, list(numbers)


@programs
def what_is_left_behind_a_break_of_the_loop(x):
    numbers = iter(range(6))
    for number in numbers:
        gradsplit.graph_break()
        x = x + number
        if number == 2:
            break
    return x, list(numbers)


@programs
def an_ended_iterator_over_a_list_that_grows(x):
    items = [1.0]
    numbers = iter(items)
    for number in numbers:
        gradsplit.graph_break()
        x = x + number
    items.append(2.0)
    return x, list(numbers)


@programs
def a_dictionary_that_grows(x):
    found = {1: 1.0, 2: 2.0}
    try:
        for key in found:
            gradsplit.graph_break()
            found[key + 10] = 1.0
            x = x + 1
    except RuntimeError as error:
        return x, found, str(error)
    return x


@programs
def functions_of_items(x):
    seen = []

    def doubled(item):
        seen.append(item)
        return item * 2

    for item in map(doubled, [1.0, 2.0, 3.0]):
        gradsplit.graph_break()
        x = x + item
    for item in filter(lambda item: item > 1.5, [1.0, 2.0, 1.0, 3.0]):
        gradsplit.graph_break()
        x = x + item
        seen.append(item)
    return x, seen


@programs
def a_zip_that_is_strict(x):
    try:
        for one, other in zip([1.0, 2.0, 3.0], [1.0, 2.0], strict=True):
            gradsplit.graph_break()
            x = x + one * other
    except ValueError as error:
        return x, str(error)
    return x


@programs
def many_kinds(x):
    out = []
    for letter in "abc":
        gradsplit.graph_break()
        x = x + len(out)
        out.append(letter)
    for number in reversed([1, 2, 3]):
        gradsplit.graph_break()
        x = x * number
    for key, item in reversed({1: 2, 3: 4}.items()):
        gradsplit.graph_break()
        x = x * key + item
    for outer in range(3):
        for place, item in enumerate([1.0, 2.0]):
            gradsplit.graph_break()
            x = x + item * outer + place
    return x, out


@programs
def kinds_of_itertools(x):
    out = []
    for item in itertools.chain([1.0, 2.0], (3.0,), {4.0: 1}):
        gradsplit.graph_break()
        x = x + item
    for item in itertools.chain.from_iterable([[1.0], [2.0, 3.0]]):
        gradsplit.graph_break()
        x = x * item
    for item in itertools.islice([1.0, 2.0, 3.0, 4.0, 5.0], 1, None, 2):
        gradsplit.graph_break()
        x = x + item
    for one, other in itertools.zip_longest([1.0, 2.0, 3.0], [1.0], fillvalue=5.0):
        gradsplit.graph_break()
        x = x + one * other
    for place, (one, other) in zip(itertools.count(), itertools.product([1.0, 2.0], repeat=2)):
        gradsplit.graph_break()
        x = x + one * other + place
        out.append(place)
    for one, other in zip(itertools.repeat(2.0), [1, 2, 3]):
        gradsplit.graph_break()
        x = x * one + other
    return x, out


@programs
def chains_of_what_changes(x):
    later, seen = [3.0], []
    numbers = itertools.chain([1.0, 2.0], later, iter([7.0]))
    for item in numbers:
        gradsplit.graph_break()
        x = x + item
        seen.append(item)
        if len(seen) < 4:
            later.append(item * 2)
        if len(seen) == 4:
            seen.append(next(numbers, None))
    return x, seen, later


@programs
def alike_and_not(x):
    """The same lines run over iterators of one class that hold different things."""
    for numbers in ([1.0, 2.0], iter([1.0, 2.0]), (item for item in (1.0, 2.0))):
        for item in itertools.islice(itertools.chain(numbers, [3.0]), 3):
            gradsplit.graph_break()
            x = x * 1.5 + item
    return x


@programs
def an_iterator_that_is_an_attribute(x):
    holder = Holder()
    holder.numbers = iter([1.0, 2.0, 3.0])
    gradsplit.graph_break()
    x = x + next(holder.numbers)
    gradsplit.graph_break()
    x = x + next(holder.numbers)
    gradsplit.graph_break()
    return x, list(holder.numbers)


def _dictionary_with_gaps(seed):
    made = {key: key * 1.0 for key in range(6)}
    del made[0], made[1]
    made[9] = 3.0 + seed
    return torch.ones(2), made


def stores_to_a_dictionary_with_gaps(x, found):
    keys = []
    for key in found:
        gradsplit.graph_break()
        found[key] = found[key] + 1
        x = x + found[key]
        keys.append(key)
    return x, found, keys


@pytest.mark.parametrize("function, settings", programs.table, ids=programs.names)
def test_same_as_plain(function, settings):
    check_program(function, graphs=None, **settings)


def test_a_dictionary_keeps_its_places():
    """Iterators stand at places, of which deleted keys leave empty ones."""
    check_program(stores_to_a_dictionary_with_gaps, _dictionary_with_gaps, graphs=None)


class Layer(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x):
        x = self.linear(x)
        for _ in range(self.breaks):
            gradsplit.graph_break()
            x = torch.tanh(x)
        return x


class Stack(nn.Module):
    def __init__(self, count, breaks, loop):
        super().__init__()
        self.layers = nn.ModuleList(Layer(breaks) for _ in range(count))
        self.loop = loop

    def forward(self, x):
        return self.loop(self, x)


def over_the_list(self, x):
    for layer in self.layers:
        x = layer(x)
    return x


def over_pairs(self, x):
    for _index, layer in enumerate(self.layers):
        x = layer(x)
    return x


def over_two(self, x):
    for layer, _number in zip(self.layers, range(100)):  # noqa: B905 - they differ in length
        x = layer(x)
    return x


def over_a_map(self, x):
    for layer in map(lambda layer: layer, self.layers):  # noqa: C417 - as programs have it
        x = layer(x)
    return x


def over_named(self, x):
    for _name, layer in reversed(self.layers._modules.items()):
        x = layer(x)
    return x


def over_a_generator(self, x):
    def outputs(x):
        for layer in self.layers:
            try:
                x = layer(x)
            finally:
                yield x

    for _output in outputs(x):
        pass
    return _output


def into_a_sum(self, x):
    return sum(layer(x) for layer in self.layers)


def over_a_slice(self, x):
    for layer in itertools.islice(itertools.chain([], list(self.layers)), 100):
        x = layer(x)
    return x


LOOPS = [over_the_list, over_pairs, over_two, over_a_map, over_named, over_a_generator, into_a_sum]
LOOPS += [over_a_slice] if sys.version_info < (3, 12) else []


def programs_of(loop, count, breaks):
    torch.manual_seed(0)
    model, x, graphs = Stack(count, breaks, loop), torch.randn(2, 8, requires_grad=True), []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.module

    compiled = CompiledFunction(model, compile_graph)
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    return len(graphs)


def test_a_piece_of_a_layer_is_captured_once():
    for loop in LOOPS:
        for breaks in (1, 2):
            assert {programs_of(loop, count, breaks) for count in (4, 8)} == {breaks + 1}, loop.__name__
