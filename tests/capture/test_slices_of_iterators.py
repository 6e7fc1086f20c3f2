"""``itertools.islice``: what it gives, and how far it takes the iterator beneath it."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradsplit

BOUNDS = [(0,), (3,), (20,), (None,), (1, None), (2, 7), (1, 9, 3), (1, 4, 2), (0, None, 4), (5, 2)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("with_break", [False, True])
def test_same_as_plain(bounds, with_break):
    def run(x):
        beneath = iter(range(10))
        found = []
        for number in itertools.islice(beneath, *bounds):
            found.append(number)
            if with_break and len(found) == 1:
                gradsplit.graph_break()
        return found, list(beneath), x + 1

    expected = run(torch.ones(1))
    compiled = gradsplit.compile(run, backend="eager", fullgraph=not with_break)
    assert compiled(torch.ones(1)) == expected


def test_wrong_bounds():
    def run(x):
        try:
            return list(itertools.islice([1, 2], -1)), x
        except ValueError as error:
            return str(error), x + 1

    x = torch.ones(1)
    assert gradsplit.compile(run, backend="eager", fullgraph=True)(x) == run(x)
