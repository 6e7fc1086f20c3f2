"""Numbers drawn from Python's and NumPy's generators: the plain program's, in one graph where they are but numbers."""

from __future__ import annotations

import random
from random import uniform

import numpy as np
import pytest
import torch

import gradsplit

own, other = random.Random(3), random.Random(4)
of_numpy = np.random.default_rng(3)


def seed_all():
    for generator in (random, own, other):
        generator.seed(7)
    of_numpy.bit_generator.state = np.random.default_rng(7).bit_generator.state


def same_draws(function, *arguments, calls=6, fullgraph=True):
    """The graphs that several calls need, whose results and generators are as those of plain calls."""
    counter = gradsplit.testing.CompileCounter()
    compiled = gradsplit.compile(function, backend=counter, fullgraph=fullgraph)
    found = []
    for step in (function, compiled):
        seed_all()
        results = [step(*arguments) for _ in range(calls)]
        found.append(
            ([item.tolist() for item in results], random.getstate(), own.getstate(), of_numpy.random())
        )
    assert found[0] == found[1]
    return counter.frame_count


def noise(x):
    y = x.sin() * random.random() + uniform(1, 2) * own.gauss(0.0, 1.0)
    return y.cos() * of_numpy.uniform(0.5, 1.5)


def seeded(x):
    random.seed(5)
    return x.exp() * random.random()


def picks(x):
    scale = own.choice([1.0, 2.0, 3.0])
    return x.exp() * scale


def offset(x):
    begin = random.randint(2, 5)
    return x[begin : begin + 3] * 2


def one_of_two(x):
    return x.sin() if random.random() < 0.5 else x.cos()


@pytest.mark.parametrize(
    ("function", "graphs"),
    [(noise, 1), (seeded, 1), (picks, 3), (one_of_two, 2)],
    ids=lambda case: getattr(case, "__name__", str(case)),
)
def test_draws_leave_the_graph_whole(function, graphs):
    assert same_draws(function, torch.linspace(-1, 1, 4), calls=8) == graphs


def test_integers_stay_open():
    assert same_draws(offset, torch.arange(10.0)) <= 2


def test_decisions_in_a_loop_end_the_graph():
    """Each combination of layers would be a program of its own."""

    def drop_layers(x):
        for layer in range(6):
            if random.random() < 0.5:
                x = x.sin() + layer
        return x

    assert same_draws(drop_layers, torch.ones(2), calls=12, fullgraph=False) < 30
    with pytest.raises(gradsplit.Unsupported, match="random-decision"):
        gradsplit.compile(drop_layers, fullgraph=True)(torch.ones(2))


def test_lists_are_drawn_by_the_program():
    def shuffled(x):
        order = list(range(3))
        random.shuffle(order)
        return x[order] * len(random.sample(range(9), 2))

    same_draws(shuffled, torch.arange(3.0), fullgraph=False)


def test_two_names_of_one_generator():
    def both(x, one, two):
        return x * one.random() + two.random()

    step = gradsplit.compile(both, backend="eager")
    for pair in ((own, other), (own, own), (other, own)):
        seed_all()
        plain = both(torch.ones(1), *pair)
        seed_all()
        assert torch.equal(step(torch.ones(1), *pair), plain)


def test_a_graph_that_raises_has_drawn_nothing():
    def fails(x, indices):
        scale = own.random()
        return x[indices] * scale

    step = gradsplit.compile(fails, backend="eager")
    step(torch.ones(3), torch.tensor([0, 2]))
    own.seed(1)
    with pytest.raises(IndexError):
        step(torch.ones(3), torch.tensor([0, 5]))
    assert own.random() == [(again := random.Random(1)).random(), again.random()][1]
